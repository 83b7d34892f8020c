"""Whether each worker's statements find what is stale by an index: PostgreSQL is asked, by EXPLAIN, nothing is run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import and_
from typing import Any, Final

from peewee import OP, SCOPE_VALUES, Expression, Field, Index

from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.error_mapping import is_unavailable
from housekeeping.sweeps.insight.diagnostics import Finding
from housekeeping.sweeps.limits.db_health import table_name
from housekeeping.sweeps.stages.stage import Explainable, ExplainQuery

_FIXED: Final = (OP.EQ, OP.IN, OP.IS, OP.IS_NOT)


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Each statement of each enabled worker."""
    now = database_now()
    for sweep in sweeps.values():
        try:
            for walk in sweep.stages_for_run():
                if isinstance(walk, Explainable):
                    for reading in walk.explain_queries(now):
                        yield _judged(sweep.name, reading)
        except Exception as error:
            if is_unavailable(error):
                raise
            # A table or column that is missing, or may not be read, and a predicate that fails, were findings before.
            yield Finding("warning", sweep.name, "indexes", f"could not be looked at: {error_line(error)}")


def _judged(worker: str, reading: ExplainQuery) -> Finding:
    fault = fault_of(explained(reading.query))
    if fault is None:
        return Finding("fine", worker, "indexes", f"{reading.what} is found by an index")
    missing = [*wanted_indexes(reading)] or [*index_of_the_walk(reading)]
    return Finding("warning", worker, "indexes", f"{reading.what}: {fault}", "; ".join(missing) or None)


def explained(query: Any) -> dict[str, Any]:
    """PostgreSQL's plan of the statement, on tables of any size as on large ones."""
    # By the database: a query that begins with a common table expression knows of none.
    sql, parameters = database.get_sql_context().sql(query).query()
    with database.atomic() as transaction:
        # Of a small table it would read all, index or not; what an index can do shows only so.
        database.execute_sql("SET LOCAL enable_seqscan = off")
        database.execute_sql("SET LOCAL enable_sort = off")
        plan: Any = database.execute_sql(f"EXPLAIN (FORMAT JSON) {sql}", parameters).fetchone()[0]
        transaction.rollback()
    top: dict[str, Any] = plan[0]["Plan"]
    return top


def fault_of(plan: dict[str, Any]) -> str | None:
    """Why the plan would become slow with the table; None when it would not."""
    nodes = list(_nodes(plan))
    if any(node["Node Type"] == "Seq Scan" for node in nodes):
        return "the whole table is read"
    for node in nodes:
        by_index = node["Node Type"] in ("Index Scan", "Index Only Scan", "Bitmap Index Scan")
        if by_index and "Index Cond" not in node and any(each["Node Type"] == "Sort" for each in nodes):
            return f"the whole of index {node['Index Name']} is read"
    return None


def wanted_indexes(reading: ExplainQuery) -> Iterator[str]:
    """Return the statements that make the indexes that the model declares for this statement.

    An index of a single field, such as the one that peewee adds for a foreign key, is declared for something else.
    """
    model, columns = reading.model, _ordered_by(reading)
    manager = model._schema
    for index in model._meta.indexes:
        if isinstance(index, Index) and (not columns or _has(index, columns[0])):
            sql, parameters = manager._create_index(index, safe=False).query()
            with database.cursor() as cursor:
                text: str = cursor.mogrify(sql, parameters).decode()
            yield text.replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY", 1)


def index_of_the_walk(reading: ExplainQuery) -> Iterator[str]:
    """Return the statement that makes an index of the columns a run follows, of the rows that may ever be stale."""
    columns = _ordered_by(reading)
    if columns:
        names = ", ".join(column.column_name for column in columns)
        yield f"CREATE INDEX CONCURRENTLY ON {table_name(reading.model)} ({names}){_of_some_rows(reading)}"


def _ordered_by(reading: ExplainQuery) -> list[Field]:
    columns = list(getattr(reading.query, "_order_by", None) or ())
    return columns if all(isinstance(column, Field) for column in columns) else []


def _has(index: Index, column: Field) -> bool:
    declared: Any = index
    return any(each is column for each in declared._expressions)


def _of_some_rows(reading: ExplainQuery) -> str:
    """Return the part of the predicate that compares columns with constants, as the condition of a partial index."""
    # One for each column: an action's own condition on the state follows from what is stale.
    found = reversed([each for each in _conditions(reading.query._where) if _is_fixed(each)])
    fixed = [*{each.lhs.name: each for each in found}.values()][::-1]
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
    """Return whether a condition is the same in each run: `=`, IN or IS of a column and constants that are no time."""
    if not isinstance(condition, Expression) or not isinstance(condition.lhs, Field):
        return False
    values = condition.rhs if isinstance(condition.rhs, list | tuple) else [condition.rhs]
    return condition.op in _FIXED and all(value is None or isinstance(value, str | int) for value in values)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)
