"""Preview of a purge: its rows, the index that finds them, and the statement of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from peewee import PeeweeException, Query

from housekeeping.core.errors import HousekeepingError, Refused, WrongArgument
from housekeeping.core.sanitize import error_line
from housekeeping.database.catalog import quoted_name
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import database, sqlstate
from housekeeping.doctor.stages import explain
from housekeeping.purge.request import PurgeRequest
from housekeeping.purge.sweep import PurgeSweep
from housekeeping.sweeps.checks.archives import problems_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.plan import Plan
from housekeeping.sweeps.insight.plan import plan as plan_of_sweep
from housekeeping.sweeps.limits.bounded_counts import CountFailed, count_rows
from housekeeping.sweeps.stages.table_stage import TableStage

#: Rows up to which a batch may sort the table. Each batch sorts all rows that match, so the work grows with its square.
SORTED_ROWS: Final = 100_000
_TIMED_OUT: Final = "57014"


@dataclass(frozen=True, slots=True)
class PurgePlan:
    """What a purge would do now.

    Attributes:
      indexes: Indexes that a batch of a large table reads; empty: it reads the whole table.
      is_sorted: Whether a batch sorts the rows that match, because no index has their order.
      held_by: The declared sweeps whose holds it applies.
      statement: The statement of the first batch, without its part for the ledger.
    """

    request: PurgeRequest
    plan: Plan
    indexes: tuple[str, ...]
    is_sorted: bool
    held_by: tuple[str, ...]
    statement: str

    @property
    def rows(self) -> int:
        """The number of rows that it would delete, as far as they were counted."""
        most = self.request.max_rows
        return self.plan.stale.rows if most is None else min(self.plan.stale.rows, most)

    @property
    def index_in_words(self) -> str:
        """The indexes as text."""
        found = ", ".join(self.indexes) or "none, the whole table is read"
        return f"{found}; each batch sorts the rows that match" if self.is_sorted else found

    def as_json(self) -> dict[str, Any]:
        """Return the object ``plan`` of ``housekeeping purge --dry-run --json``."""
        return {
            **self.plan.as_json(),
            "table": self.request.table,
            "where": self.request.where,
            "indexes": list(self.indexes),
            "sorted": self.is_sorted,
            "held_by": list(self.held_by),
            "statement": self.statement,
        }


def plan_purge(request: PurgeRequest, sweep: PurgeSweep, *, force: bool = False) -> PurgePlan:
    """Return what the purge would do now, and change nothing.

    Parameters:
      force: Accept an order without an index on a large table.

    Raises:
      WrongArgument: PostgreSQL rejects the WHERE, a large table has no index for the order, or the archive cannot take
        the rows.
      Refused: The count took too long.
      peewee.PeeweeException: The database fails for another reason.
    """
    (stage,) = sweep.stages_for_run()
    assert isinstance(stage, TableStage)
    for problem in problems_of([stage]):
        raise WrongArgument(f"--archive-to: {problem.text}" + "".join(f"; {each}" for each in problem.statements))
    now = database_now()
    rows = stage.explain_queries(now)[0].query
    try:
        nodes = explain(rows)
    except PeeweeException as error:
        if (sqlstate(error) or "")[:2] not in ("42", "22"):
            raise
        raise WrongArgument(f"--where is no condition on {request.table}: {error_line(error)}") from None
    is_sorted = any(node["Node Type"] == "Sort" for node in nodes)
    if is_sorted and request.order_by and not force:
        _refuse_large_table(request, sweep, stage)
    indexes = dict.fromkeys(node["Index Name"] for node in nodes if "Index Name" in node)
    try:
        planned = plan_of_sweep(sweep, force=force, confirmed=True)
    except (PeeweeException, HousekeepingError) as error:
        if sqlstate(error.__cause__ or error) != _TIMED_OUT:
            raise
        raise Refused(
            "the rows could not be counted within statement_timeout; create an index for --where, or raise the limit: "
            "add ?options=-cstatement_timeout%3D10min to the database's URL"
        ) from None
    return PurgePlan(
        request, planned, tuple(indexes), is_sorted, sweep.held_by, _text_of(stage.statements_of_a_run(now)[0])
    )


def _refuse_large_table(request: PurgeRequest, sweep: Sweep, stage: TableStage) -> None:
    name = quoted_name(stage.model)
    try:
        rows = count_rows(name, SORTED_ROWS + 1, sweep.max_runtime)
    except CountFailed as error:
        if not error.timed_out:
            raise
        rows = SORTED_ROWS + 1
    if rows > SORTED_ROWS:
        columns = ", ".join(request.order_by)
        raise WrongArgument(
            f"{request.table} has over {SORTED_ROWS:,} rows and no index for --order-by {columns}, so that each batch "
            f"would sort them; CREATE INDEX CONCURRENTLY ON {name} ({columns}), leave --order-by out, or add --force"
        )


def _text_of(query: Query) -> str:
    sql, parameters = database.get_sql_context().sql(query).query()
    text: bytes = database.mogrify(sql, parameters)
    return text.decode()
