"""One-off purge: a run that deletes the rows of one table that match a WHERE, without a declaration.

Start at `sweep_of`: it makes a `Sweep` of a `PurgeRequest`, and the engine runs it like any other. The request is
stored in the run's row, so that a later run can resume it. `insight.plan.plan_purge` previews the run.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import reduce
from typing import Any, ClassVar, Final

from peewee import Model

from housekeeping.core.errors import DeclarationError, DependentsRefused, WrongArgument
from housekeeping.core.logs import counted
from housekeeping.core.settings import MAIN
from housekeeping.database.catalog import key_of, listed_for_sql, quoted_name
from housekeeping.database.connection import database
from housekeeping.engine.guard import CountFailed, count_rows
from housekeeping.ledger import history, runs
from housekeeping.ledger.history import RunRecord
from housekeeping.ledger.runs import PURGE, SILENCE, Counts
from housekeeping.ledger.schema import Run, run_label
from housekeeping.sweeps.actions import Delete
from housekeeping.sweeps.conditions import as_condition, check_expression
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.keyset import Hold, hold_of_another_table
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.rows import Rows
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.sweeps.tables import build_model, describe, keyset_order
from housekeeping.sweeps.values import Decision, Guard, Limits, Setup, declared

#: Rows up to which a batch may sort the table. Each batch sorts all rows that match, so the work grows with its square.
SORTED_ROWS: Final = 100_000
#: Whether two names are one table, or a partitioned table and one of its partitions.
_HAS_SAME_ROWS: Final = """
SELECT to_regclass(%(declared)s) IN (
    SELECT to_regclass(%(purged)s)
    UNION SELECT relid FROM pg_partition_ancestors(to_regclass(%(purged)s))
    UNION SELECT relid FROM pg_partition_tree(to_regclass(%(purged)s))
)
"""


def holds_on(model: type[Model], database_name: str, sweeps: Iterable[Sweep]) -> dict[str, Hold]:
    """Return the holds of sweeps on the model's table, by the name of the sweep.

    The hold of a disabled or paused sweep counts as well.

    Parameters:
      database_name: The database of the table, which is the current one.

    Raises:
      peewee.PeeweeException: The catalog cannot be read.
    """
    found: dict[str, Hold] = {}
    for sweep in sweeps:
        for stage in sweep.declared_stages() if sweep.database == database_name else ():
            if isinstance(stage, TableStage | PartitionStage) and stage.hold is not None:
                if _has_same_rows(stage.model, model):
                    found[sweep.name] = hold_of_another_table(stage.hold, stage.model, model)
    return found


def any_of(holds: Mapping[str, Hold]) -> Hold | None:
    """Combine the holds into one that keeps a row if any of them does; None without holds."""
    if not holds:
        return None
    return lambda now: reduce(operator.or_, [hold(now) for hold in holds.values()])


def _has_same_rows(declared: type[Model], purged: type[Model]) -> bool:
    names = {"declared": quoted_name(declared), "purged": quoted_name(purged)}
    row: Any = database.execute_sql(_HAS_SAME_ROWS, names).fetchone()
    return bool(row[0])


#: Rows of the first batch. A batch locks its rows until it commits, usually after some milliseconds.
BATCH_SIZE: Final = 1000
#: Without --max-runtime a purge ends when no row is left. A run needs some limit; this one is out of reach.
NO_LIMIT: Final = timedelta(days=365)


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeRequest:
    """Options of ``housekeeping purge``.

    Attributes:
      table: The table, as the operator has named it.
      where: An SQL expression for the rows to delete.
      order_by: Columns that order the rows; the primary key follows them.
      max_rows: The most rows to delete; None for all.
      max_runtime_s: Seconds after which no batch begins; None for no limit.
      max_rows_per_s: The most rows per second; None for no limit.
      archive_to: Table that gets the rows before they are deleted; with `cascade` the schema of such tables.
      ignore_holds: Whether rows that a declared sweep holds are deleted, too.
      cascade: Decisions about the rows that depend on them, as `Delete.dependents`, in addition to those of the foreign
        keys; None to leave such rows to PostgreSQL.
      resumes: The run that this one continues.
    """

    table: str
    where: str
    order_by: tuple[str, ...] = ()
    batch_size: int = BATCH_SIZE
    max_rows: int | None = None
    max_runtime_s: float | None = None
    max_rows_per_s: float | None = None
    archive_to: str | None = None
    ignore_holds: bool = False
    cascade: Mapping[str, Decision] | None = None
    database: str = MAIN
    resumes: int | None = None

    @property
    def worker(self) -> str:
        """Name of the run in the ledger and in logs."""
        return f"purge:{self.table}"

    @property
    def max_runtime(self) -> timedelta:
        return NO_LIMIT if self.max_runtime_s is None else timedelta(seconds=self.max_runtime_s)

    def as_count(self) -> Counts:
        """Return the count ``purge`` of a run, as the ledger stores it."""
        stored = asdict(self)
        del stored["database"]  # the one that has the ledger
        return {PURGE: stored}


def request_of(run_id: int) -> PurgeRequest:
    """Return the request that continues a purge in the current database, and close the purge if it has been silent.

    Raises:
      WrongArgument: The run is no purge, or there is nothing to continue.
    """
    record = _found(run_id)
    request = recorded_request(record)
    if record.lost:
        runs.closing_dead_runs(record.worker).execute()
        record = _found(run_id)  # its counts are final only now
    _refuse_ended(record)
    if request.max_rows is None:
        return replace(request, resumes=run_id)
    left = request.max_rows - int(record.counts.get("deleted_rows") or 0)
    if left <= 0:
        raise WrongArgument(f"run {record.label} has deleted {counted(request.max_rows, 'row')}, all of its --max-rows")
    return replace(request, resumes=run_id, max_rows=left)


def recorded_request(record: RunRecord) -> PurgeRequest:
    """Return the options of a purge from its run in the ledger.

    Raises:
      WrongArgument: The run is no purge.
    """
    stored = record.counts.get(PURGE)
    if not isinstance(stored, dict):
        raise WrongArgument(f"run {record.label} is a run of {record.worker} and no purge; only a purge can be resumed")
    return PurgeRequest(**{**stored, "order_by": tuple(stored["order_by"])}, database=record.database)


def _found(run_id: int) -> RunRecord:
    record = history.find(run_id)
    if record is None:
        raise WrongArgument(f"there is no run {run_id}; housekeeping runs lists them")
    return record


def _refuse_ended(record: RunRecord) -> None:
    if record.outcome == "done":
        raise WrongArgument(f"run {record.label} is done; there is nothing to resume")
    if record.outcome is None:
        wait_s = max(1, round(SILENCE.total_seconds() - (record.silent_s or 0)))
        raise WrongArgument(
            f"run {record.label} may still be at work ({record.process}); it can be resumed once it has been silent "
            f"for {SILENCE.total_seconds():.0f} s, in {wait_s} s at the earliest"
        )
    later = runs.resumed_by(record.run_id)
    if later is not None:
        raise WrongArgument(
            f"run {record.label} was resumed by run {run_label(later, record.database)}; resume that one"
        )


def model_of_table(name: str) -> type[Model]:
    """Return the model of a table in the current database. Its statements call the table by its name, without a schema.

    Raises:
      WrongArgument: There is no such table, it has no primary key, or it belongs to PostgreSQL or to the library.
      peewee.PeeweeException: The catalog cannot be read.
    """
    try:
        described = describe(name)
    except DeclarationError as error:
        raise WrongArgument(str(error)) from None
    if described.schema == Run._meta.schema:
        raise WrongArgument(f"{name} is one of the library's own tables; housekeeping.old_runs removes its old rows")
    if not described.key:
        raise WrongArgument(f"{name} has no primary key, which a purge needs to continue after any row; add one")
    model = build_model(described)
    meta: Any = model._meta
    # So that a WHERE can name the table in a subquery: orders.session_id = sessions.id.
    meta.table._alias = described.name
    return model


@declared
class _Limits(Limits):
    """Limits of a purge, which ends when no row is left, whenever that is."""

    runtime: timedelta = NO_LIMIT


@declared
class PurgeSweep(Sweep):
    """Sweep of one `housekeeping purge`, made from its options. Its name has a colon, which declared names cannot have.

    Attributes:
      held_by: The declared sweeps whose holds it applies.
      declared: All declared sweeps.
    """

    held_by: tuple[str, ...] = field(default=(), kw_only=True)
    declared: tuple[Sweep, ...] = field(default=(), kw_only=True)

    predicate_name: ClassVar[str] = "--where"
    rows_called: ClassVar[str] = "matching"
    decides_by: ClassVar[str] = "add --cascade and a decision, such as --decide {}=delete"
    _name_form: ClassVar[re.Pattern[str]] = re.compile(r"purge:[^\x00-\x1f]{1,200}")


def sweep_of(request: PurgeRequest, declared: Iterable[Sweep] = ()) -> PurgeSweep:
    """Return the sweep of a purge; reads the table from the catalog of the current database.

    Parameters:
      declared: Sweeps whose holds on the table the purge applies, unless it ignores them.

    Raises:
      WrongArgument: The table, the WHERE, a column of the order or the archive's name is wrong.
      peewee.PeeweeException: The catalog cannot be read.
    """
    check_expression(request.where)
    declared = tuple(declared)
    model = model_of_table(request.table)
    stale: Any = as_condition(request.where)
    holds = {} if request.ignore_holds else holds_on(model, request.database, declared)
    hold = any_of(holds)
    return PurgeSweep(
        request.worker,
        Rows(
            model,
            stale=lambda row: stale,
            hold=None if hold is None else lambda row, now: hold(now),
            order=_order(request, model),
            action=_delete(request),
        ),
        held_by=tuple(holds),
        declared=declared,
        limits=_Limits(
            request.batch_size,
            request.max_runtime,
            # A fresh purge has another WHERE than the last one; a resumed run is given its cursor.
            resume="never",
            rows_per_s=request.max_rows_per_s,
        ),
        guard=Guard(times_history=None, first_run=False),
        database=request.database,
        # A purge with dependents looks for holds of their tables.
        setup=Setup(declared=lambda: () if request.ignore_holds else declared),
    )


def _order(request: PurgeRequest, model: type[Model]) -> tuple[str, ...]:
    try:
        order = keyset_order("--order-by", model, request.order_by)
    except DeclarationError as error:
        raise WrongArgument(str(error)) from None
    # Columns after the whole key make no difference.
    key = key_of(model)
    last = max(place for place, column in enumerate(order) if any(column is each for each in key))
    return tuple(column.name for column in order[: last + 1])


def _delete(request: PurgeRequest) -> Delete:
    if request.cascade is not None and "." in (request.archive_to or ""):
        raise WrongArgument(f"--archive-to is {request.archive_to!r}; with --cascade, write the name of a schema")
    try:
        if request.cascade is None:
            return Delete(archive_to=request.archive_to)
        return Delete(archive_to=request.archive_to, dependents=request.cascade or True)
    except DeclarationError as error:
        raise WrongArgument(f"--archive-to: {error}") from None


def refuse_large_table(request: PurgeRequest, sweep: Sweep, stage: TableStage) -> None:
    """Refuse an order without an index on a table with many rows.

    Raises:
      WrongArgument: The table has more than `SORTED_ROWS` rows, or they could not be counted in time.
    """
    name = quoted_name(stage.model)
    try:
        rows = count_rows([name], SORTED_ROWS + 1, sweep.limits.runtime)
    except CountFailed as error:
        if not error.timed_out:
            raise
        rows = SORTED_ROWS + 1
    if rows > SORTED_ROWS:
        columns = ", ".join(request.order_by)
        index = f"CREATE INDEX CONCURRENTLY ON {name} ({listed_for_sql(request.order_by)})"
        raise WrongArgument(
            f"{request.table} has over {SORTED_ROWS:,} rows and no index for --order-by {columns}, so that each batch "
            f"would sort them; {index}, leave --order-by out, or add --force"
        )


def with_options(error: DependentsRefused) -> str:
    """Return the text of the error, with its decisions as options of the command."""
    options = " ".join(f"--decide {name}={each}" for name, each in error.decisions.items())
    return f"{error.problem}; {error.advice}: {options}" if options else str(error)
