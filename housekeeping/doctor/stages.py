"""Checks of each sweep's stages on the real tables: unique keys, foreign keys, indexes by EXPLAIN, throttles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial, reduce
from operator import and_
from typing import Any, Final

from peewee import OP, SCOPE_VALUES, Expression, Field, Index

from housekeeping.core.errors import DependentsRefused
from housekeeping.core.logs import error_line, typed_error_line
from housekeeping.core.settings import Settings
from housekeeping.database.catalog import (
    declared_key_columns,
    listed_for_sql,
    quoted_name,
    table_if_visible,
    vouches_for_key,
)
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, database, time_limit
from housekeeping.database.errors import NO_RIGHT, is_timeout, is_unavailable, sqlstate
from housekeeping.database.queries import Recorder, database_now, explain, written_out
from housekeeping.engine.speed import read_wal, reason_to_wait
from housekeeping.insight.plan import inverted_comparison
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.dependents import CONSTRAINT_DECIDES, Link
from housekeeping.sweeps.keyset import ExceptHeld, Groups, conditions_of
from housekeeping.sweeps.stage import Explainable, ExplainQuery, Stage
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.sweeps.tables import OrmRule, orm_rules
from housekeeping.sweeps.tree import read_known_tables, sampled_branches
from housekeeping.sweeps.validate_tables import refused_by_citus, wrong_key
from housekeeping.sweeps.values import Finding

#: Beginning of the text of a check that failed.
UNEXAMINED: Final = "could not be examined: "
#: What to do about a timeout.
FIND_LOCK: Final = "see which session holds the lock, or what slows the database: housekeeping doctor --database"
#: Classes of PostgreSQL's codes for a statement that it rejects, and for a value.
_REJECTED: Final = ("42", "22")
#: Missing table, missing column, missing right: other checks report them.
_REPORTED: Final = ("42P01", "42703", NO_RIGHT)
_FIXED: Final = (OP.EQ, OP.IN, OP.IS, OP.IS_NOT)


def examine_stages(settings: Settings, sweeps: dict[str, Sweep], declared: Collection[Sweep] = ()) -> Iterator[Finding]:
    """Yield findings about the predicate and the key of each stage, foreign keys to deleted rows, and the indexes.

    Parameters:
      declared: All sweeps. The holds and archives of disabled ones count as well.
    """
    now = database_now()
    dependents = partial(_dependents, [*declared, *sweeps.values()])
    broken: set[str] = set()
    made: dict[str, tuple[Stage, ...]] = {}
    for subject, check in (
        ("predicate", _predicates),
        ("key", _keys),
        ("dependents", dependents),
        ("indexes", _indexes),
    ):
        for sweep in sweeps.values():
            if sweep.name in broken:  # each statement would fail like the first one
                continue
            found = _checked(sweep, made, subject, check, now)
            broken.update(each.area for each in found if subject == "predicate" and each.level == "error")
            yield from found


def _checked(
    sweep: Sweep,
    made: dict[str, tuple[Stage, ...]],
    subject: str,
    check: Callable[[Sweep, Sequence[Stage], datetime], Iterable[Finding]],
    now: datetime,
) -> list[Finding]:
    try:
        with time_limit(STATEMENT_TIME, LOCK_TIME):
            if sweep.name not in made:
                made[sweep.name] = sweep.stages_for_run()
            return list(check(sweep, made[sweep.name], now))
    except DependentsRefused as error:
        is_here = subject == "dependents"
        return [Finding("error", sweep.name, subject, error.problem, error.way_out)] if is_here else []
    except Exception as error:
        if is_unavailable(error):
            raise
        if subject == "predicate":
            return _rejected(sweep, error)
        # Earlier checks report missing or unreadable tables and columns, and failing predicates.
        return [unexamined(sweep.name, subject, error)]


def unexamined(area: str, subject: str, error: BaseException) -> Finding:
    """Return the finding of a check that failed; of a timeout, with the command that shows its cause."""
    way_out = FIND_LOCK if is_timeout(error) else None
    return Finding("warning", area, subject, f"{UNEXAMINED}{error_line(error)}", way_out)


def _rejected(sweep: Sweep, error: Exception) -> list[Finding]:
    """Return the finding of a predicate that PostgreSQL rejects. Other checks report other errors."""
    code = sqlstate(error) or ""
    if code[:2] not in _REJECTED or code in _REPORTED:
        return []
    return [Finding("error", sweep.name, "predicate", error_line(error), f"correct {sweep.predicate_name}")]


def _predicates(sweep: Sweep, stages: Sequence[Stage], now: datetime) -> Iterator[Finding]:
    for stage in stages:
        if (refusal := refused_by_citus(stage)) is not None:
            yield Finding("error", sweep.name, "distributed table", *refusal)
        elif isinstance(stage, TableStage):
            line = inverted_comparison(stage, now)
            if line is not None:
                yield Finding("warning", sweep.name, "predicate", line)


def _keys(sweep: Sweep, stages: Sequence[Stage], now: datetime) -> Iterator[Finding]:
    for stage in stages:
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


def _dependents(declared: Collection[Sweep], sweep: Sweep, stages: Sequence[Stage], now: datetime) -> Iterator[Finding]:
    with database.atomic():
        found = sampled_branches(sweep, stages, now, declared, read_known_tables(sweep, stages))
    rules = orm_rules(getattr(part, "table", None) for part in sweep.parts) if found else []
    for each in found:
        subject = f"dependents of {each.path[0].parent}"
        yield Finding(each.level, sweep.name, subject, each.text, each.way_out)
        for rule in rules:
            if (contradiction := _contradiction(each.link, rule)) is not None:
                yield Finding("warning", sweep.name, subject, *contradiction)


def _contradiction(link: Link, rule: OrmRule) -> tuple[str, str] | None:
    """Return how the rule of the ORM differs from the constraint, and the remedy; None if they agree.

    A constraint without an action, the only kind that Django creates, leaves the decision to the sweep.
    """
    name = link.table.rpartition(".")[2].strip('"')
    own = CONSTRAINT_DECIDES.get(link.on_delete)
    if (rule.table, rule.columns) != (name, link.columns) or rule.decision == (own or link.decision or "keep"):
        return None
    other = link.rule if own is not None or link.decision is None else f'the sweep says "{link.decision}"'
    text = f"{link.name}: {rule.text}, which means {rule.decision}, but {other}"
    decision = f'Delete(dependents={{"{link.name}": "{rule.decision}"}})'
    return text, f"if the model is right: {decision}; else correct the model"


def _indexes(sweep: Sweep, stages: Sequence[Stage], now: datetime) -> Iterator[Finding]:
    for stage in stages:
        # The settings of `explain` do not reach the shards, whose plans say nothing of a large table then.
        if isinstance(stage, Explainable) and not (isinstance(stage, TableStage) and stage.is_distributed):
            for query in stage.explain_queries(now):
                yield _index_finding(sweep.name, stage, query, now)


def held_tables(stage: TableStage, now: datetime) -> Collection[str]:
    """Return the names of the other tables that the stage's hold reads."""
    if not isinstance(stage.stale, ExceptHeld):
        return ()
    recorder = Recorder()
    recorder.sql(stage.stale.condition(now))
    models: list[Any] = [model for model in recorder.models if model is not stage.model]
    return {model._meta.table_name for model in models}


def _index_finding(worker: str, stage: Explainable, query: ExplainQuery, now: datetime) -> Finding:
    nodes = explain(query.query)
    table = stage if isinstance(stage, TableStage) else None
    held = () if table is None else held_tables(table, now)
    groups = None if table is None else table.groups(table.stale(now))
    fault = fault_of(nodes) if groups is None else _fault_of_groups(nodes, groups)
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
    missing = [*_declared_indexes(query)]
    if not missing and query.order:
        missing = [_suggested_index(query, table.stale(now) if table is not None and groups is None else None)]
    return Finding("warning", worker, "indexes", f"{query.what}: {fault}", "; ".join(missing) or None)


def fault_of(nodes: list[dict[str, Any]]) -> str | None:
    """Return why a plan with these nodes is slow on a large table, or `None`."""
    if any(node["Node Type"] == "Seq Scan" for node in nodes):
        return "the whole table is read"
    for node in nodes:
        by_index = node["Node Type"] in ("Index Scan", "Index Only Scan", "Bitmap Index Scan")
        if by_index and "Index Cond" not in node and any(each["Node Type"] == "Sort" for each in nodes):
            return f"the whole of index {node['Index Name']} is read"
    return None


def _fault_of_groups(nodes: list[dict[str, Any]], groups: Groups) -> str | None:
    """Return why a plan that goes through the groups of the rows is slow on a large table, or `None`."""
    # The groups themselves are read one by one.
    fault = fault_of([node for node in nodes if node.get("Relation Name") != groups.table_name])
    name = groups.column.column_name
    if fault is None and not any(name in node.get("Index Cond", "") for node in nodes):
        return f"the rows of each {name} are searched in an index that does not begin with it"
    return fault


def _declared_indexes(query: ExplainQuery) -> Iterator[str]:
    """Yield the statements that create the indexes that the model declares for the query's order of rows.

    Without a known order, yield all. Indexes of single fields, such as foreign keys, are left out.
    """
    for index in query.model._meta.indexes:
        if isinstance(index, Index):
            compiled = Recorder()
            compiled.sql(index)
            if not query.order or query.order[0] in compiled.fields:
                yield written_out(index.safe(False)).replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY", 1)


def _suggested_index(query: ExplainQuery, predicate: Any) -> str:
    """Return the statement that creates an index of the query's order, limited to rows that can become stale."""
    names = listed_for_sql(column.column_name for column in query.order)
    # One condition per column: an action repeats the predicate's condition on the state.
    conditions = reversed([each for each in conditions_of(predicate) if _is_fixed(each)])
    fixed = [*{each.lhs.name: each for each in conditions}.values()][::-1]
    where = f" WHERE {written_out(reduce(and_, fixed), scope=SCOPE_VALUES)}" if fixed else ""
    return f"CREATE INDEX CONCURRENTLY ON {quoted_name(query.model)} ({names}){where}"


def _is_fixed(condition: Any) -> bool:
    """Return whether the condition compares a column with constants other than times by `=`, IN or IS."""
    if not isinstance(condition, Expression) or not isinstance(condition.lhs, Field):
        return False
    values = condition.rhs if isinstance(condition.rhs, list | tuple) else [condition.rhs]
    return condition.op in _FIXED and all(value is None or isinstance(value, str | int) for value in values)


#: What a run does with a throttle that cannot be read.
_IGNORED: Final = "runs continue without this throttle"


def examine_throttles(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about limits on WAL and about custom functions, which it calls. Other limits need no check."""
    for sweep in sweeps.values():
        throttle = sweep.limits.throttle
        if (throttle.wal_mb_per_s, throttle.slot_lag_mb) != (None, None):
            yield _wal(sweep)
        if sweep.limits.throttle.custom is not None:
            yield _custom(sweep.name, sweep.limits.throttle.custom)


def _wal(sweep: Sweep) -> Finding:
    named = [name for name in ("wal_mb_per_s", "slot_lag_mb") if getattr(sweep.limits.throttle, name) is not None]
    subject, state = f"gates {', '.join(named)}", read_wal()
    if state.position is not None:
        return Finding("fine", sweep.name, subject, "the server's WAL can be read")
    trouble = state.trouble or "the server is a standby, which writes no WAL"
    return Finding("warning", sweep.name, subject, f"{trouble}; {_IGNORED}")


def _custom(worker: str, custom: Callable[[], str | None]) -> Finding:
    try:
        reason = reason_to_wait(custom)
    except Exception as error:
        text = f"the function fails: {typed_error_line(error)}; {_IGNORED}"
        return Finding("warning", worker, "gates custom", text, "correct the function, or set gates.custom to null")
    return Finding("fine", worker, "gates custom", "no reason to wait" if reason is None else f"waits: {reason}")
