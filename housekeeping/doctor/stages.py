"""Checks of each sweep's stages on the real tables: unique keys, foreign keys, and indexes by EXPLAIN."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from functools import reduce
from operator import and_
from typing import Any, Final

from peewee import OP, SCOPE_VALUES, Expression, Field, Index

from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.database.catalog import quoted_name, table_if_visible
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import database
from housekeeping.database.errors import is_unavailable
from housekeeping.database.primary_key import declared_key_columns, vouches_for_key
from housekeeping.database.time_limit import LOCK_TIME, STATEMENT_TIME, time_limit
from housekeeping.sweeps.checks.references import sampled_references
from housekeeping.sweeps.checks.statements import Recorder
from housekeeping.sweeps.checks.unique_keys import key_in_model, wrong_key
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.registry import Finding
from housekeeping.sweeps.stages.hold import ExceptHeld
from housekeeping.sweeps.stages.stage import Explainable, ExplainQuery
from housekeeping.sweeps.stages.table_stage import TableStage

#: Beginning of the text of a check that failed.
UNEXAMINED: Final = "could not be examined: "
_FIXED: Final = (OP.EQ, OP.IN, OP.IS, OP.IS_NOT)


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about the key of each stage, the foreign keys that reference deleted rows, and the indexes."""
    now = database_now()
    for subject, check in (("key", _keys), ("references", _references), ("indexes", _indexes)):
        for sweep in sweeps.values():
            yield from _checked(sweep, subject, check, now)


def _checked(
    sweep: Sweep, subject: str, check: Callable[[Sweep, datetime], Iterable[Finding]], now: datetime
) -> list[Finding]:
    try:
        with time_limit(STATEMENT_TIME, LOCK_TIME):
            return list(check(sweep, now))
    except Exception as error:
        if is_unavailable(error):
            raise
        # Earlier checks report missing or unreadable tables and columns, and failing predicates.
        return [Finding("warning", sweep.name, subject, f"{UNEXAMINED}{error_line(error)}")]


def _keys(sweep: Sweep, now: datetime) -> Iterator[Finding]:
    for stage in sweep.stages_for_run():
        if isinstance(stage, TableStage):
            yield from _key_findings(sweep, stage)


def _key_findings(sweep: Sweep, stage: TableStage) -> Iterator[Finding]:
    model, table = stage.model, table_if_visible(stage.model)
    name = quoted_name(model)
    subject, declared = f"key of {name}", ", ".join(declared_key_columns(model))
    if not table.exists or vouches_for_key(model):
        return
    if not table.enforced:
        text = f"{name} is a view, a foreign table or has inheriting tables: ({declared}) may not be unique"
        yield Finding(
            "warning",
            sweep.name,
            subject,
            text,
            "make sure that it is, then declare it: key_is_unique = True in class Meta",
        )
    elif (mismatch := wrong_key(stage)) is not None:
        yield Finding("error", sweep.name, subject, *mismatch)
    elif not table.is_unique(declared_key_columns(model)) and sweep.stages is None:
        used = ", ".join(column.column_name for column in stage.key)
        text = f"{model.__name__} declares the key ({declared}), which is not unique; runs use ({used})"
        yield Finding("warning", sweep.name, subject, text, key_in_model(model, table))


def _references(sweep: Sweep, now: datetime) -> Iterator[Finding]:
    with database.atomic():
        found = sampled_references(sweep.stages_for_run(), now)
    for each in found:
        yield Finding(each.level, sweep.name, f"references to {each.referenced}", each.text, each.way_out)


def _indexes(sweep: Sweep, now: datetime) -> Iterator[Finding]:
    for stage in sweep.stages_for_run():
        if isinstance(stage, Explainable):
            held = held_tables(stage) if isinstance(stage, TableStage) else ()
            for query in stage.explain_queries(now):
                yield _index_finding(sweep.name, query, held)


def held_tables(stage: TableStage) -> Collection[str]:
    """Return the names of the other tables that the stage's hold reads."""
    if not isinstance(stage.stale, ExceptHeld):
        return ()
    recorder = Recorder()
    recorder.sql(stage.stale.condition())
    models: list[Any] = [model for model in recorder.models if model is not stage.model]
    return {model._meta.table_name for model in models}


def _index_finding(worker: str, query: ExplainQuery, held: Collection[str] = ()) -> Finding:
    nodes = explain(query.query)
    fault = fault_of(nodes)
    scanned = {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"}
    if scanned and scanned <= set(held):
        names = ", ".join(sorted(scanned))
        return Finding(
            "warning",
            worker,
            "indexes",
            f"{query.what}: each batch reads the whole table {names} of its hold",
            f"create an index on the columns of {names} that the hold compares, unless the table stays small",
        )
    if fault is None:
        return Finding("fine", worker, "indexes", f"{query.what} uses an index")
    missing = [*declared_indexes(query)] or [*suggested_index(query)]
    return Finding("warning", worker, "indexes", f"{query.what}: {fault}", "; ".join(missing) or None)


def explain(query: Any) -> list[dict[str, Any]]:
    """Return the nodes of PostgreSQL's plan of the statement, as for a large table."""
    # The database's context: a query that starts with a common table expression has none of its own.
    sql, parameters = database.get_sql_context().sql(query).query()
    with database.atomic() as transaction:
        # PostgreSQL scans small tables even if they have a suitable index.
        database.execute_sql("SET LOCAL enable_seqscan = off")
        database.execute_sql("SET LOCAL enable_sort = off")
        plan: Any = database.execute_sql(f"EXPLAIN (FORMAT JSON) {sql}", parameters).fetchone()[0]
        transaction.rollback()
    return list(_nodes(plan[0]["Plan"]))


def fault_of(nodes: list[dict[str, Any]]) -> str | None:
    """Return why a plan with these nodes is slow on a large table, or `None`."""
    if any(node["Node Type"] == "Seq Scan" for node in nodes):
        return "the whole table is read"
    for node in nodes:
        by_index = node["Node Type"] in ("Index Scan", "Index Only Scan", "Bitmap Index Scan")
        if by_index and "Index Cond" not in node and any(each["Node Type"] == "Sort" for each in nodes):
            return f"the whole of index {node['Index Name']} is read"
    return None


def declared_indexes(explained: ExplainQuery) -> Iterator[str]:
    """Yield the statements that create the indexes that the model declares for the query's order of rows.

    Without a known order, yield all. Indexes of single fields, such as foreign keys, are left out.
    """
    model, columns = explained.model, _ordered_by(explained)
    manager = model._schema
    for index in model._meta.indexes:
        if isinstance(index, Index) and (not columns or _has(index, columns[0])):
            sql, parameters = manager._create_index(index, safe=False).query()
            with database.cursor() as cursor:
                text: str = cursor.mogrify(sql, parameters).decode()
            yield text.replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY", 1)


def suggested_index(explained: ExplainQuery) -> Iterator[str]:
    """Yield the statement that creates an index of the run's order, limited to rows that can become stale."""
    columns = _ordered_by(explained)
    if columns:
        names = ", ".join(column.column_name for column in columns)
        yield f"CREATE INDEX CONCURRENTLY ON {quoted_name(explained.model)} ({names}){_partial_condition(explained)}"


def _ordered_by(explained: ExplainQuery) -> list[Field]:
    columns = list(getattr(explained.query, "_order_by", None) or ())
    return columns if all(isinstance(column, Field) for column in columns) else []


def _has(index: Index, column: Field) -> bool:
    declared: Any = index
    return any(each is column for each in declared._expressions)


def _partial_condition(explained: ExplainQuery) -> str:
    """Return the constant part of the predicate as the condition of a partial index."""
    # One condition per column: an action repeats the predicate's condition on the state.
    conditions = reversed([each for each in _conditions(explained.query._where) if _is_fixed(each)])
    fixed = [*{each.lhs.name: each for each in conditions}.values()][::-1]
    if not fixed:
        return ""
    sql, parameters = database.get_sql_context(scope=SCOPE_VALUES).sql(reduce(and_, fixed)).query()
    with database.cursor() as cursor:
        text: str = cursor.mogrify(sql, parameters).decode()
    return f" WHERE {text}"


def _conditions(predicate: Any) -> Iterator[Any]:
    if isinstance(predicate, Expression) and predicate.op == OP.AND:
        yield from _conditions(predicate.lhs)
        yield from _conditions(predicate.rhs)
    else:
        yield predicate


def _is_fixed(condition: Any) -> bool:
    """Return whether the condition compares a column with constants other than times by `=`, IN or IS."""
    if not isinstance(condition, Expression) or not isinstance(condition.lhs, Field):
        return False
    values = condition.rhs if isinstance(condition.rhs, list | tuple) else [condition.rhs]
    return condition.op in _FIXED and all(value is None or isinstance(value, str | int) for value in values)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)
