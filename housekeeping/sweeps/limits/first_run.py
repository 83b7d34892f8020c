"""Guard of a first run, and of a changed predicate: a confirmation is needed to process a large part of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from peewee import ProgrammingError

from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.catalog import quoted_name
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import run_queries
from housekeeping.sweeps.ledger.runs import Counts
from housekeeping.sweeps.limits.bounded_counts import CountFailed, count_rows, count_stale, estimated_rows
from housekeeping.sweeps.limits.breaker import with_argument
from housekeeping.sweeps.limits.fingerprint import fingerprint
from housekeeping.sweeps.partitions.catalog import Partition
from housekeeping.sweeps.partitions.detaching import is_gone
from housekeeping.sweeps.partitions.stage import PartitionStage
from housekeeping.sweeps.stages.stage import Backlog, Stage
from housekeeping.sweeps.stages.table_stage import TableStage

logger = named_logger(__name__)

#: Reason of the skipped run, its count, and the name of its alert.
UNCONFIRMED: Final = "unconfirmed"
#: A first run may process one row in five (20 %) without a confirmation.
ONE_IN: Final = 5
#: Fewer stale rows need no confirmation, whatever their share: a trial, or a small table.
AT_LEAST: Final = 1000
#: Rows of a table counted exactly; above this PostgreSQL's estimate is good enough.
_COUNTED: Final = 100_000


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """A table of which a first run would process too much without a confirmation.

    Attributes:
      worker: The worker, with its argument, as the command line takes it.
      stale: The stale rows, as far as they could be counted; None if the count took too long or failed.
      limit: The number of stale rows that need no confirmation.
      rows: The table's rows, estimated above 100,000; None if the count took too long or failed.
      changed: Whether a run has completed, with another predicate or table.
    """

    worker: str
    table: str
    stale: Backlog | None
    limit: int
    rows: int | None
    changed: bool = False

    def as_count(self) -> Counts:
        """Return the count ``unconfirmed`` of the skipped run, as the ledger stores it."""
        return {
            "worker": self.worker,
            "table": self.table,
            "stale": None if self.stale is None else self.stale.rows,
            "exact": self.stale is not None and self.stale.exact,
            "limit": self.limit,
            "rows": self.rows,
            "changed": self.changed,
        }

    def __str__(self) -> str:
        return in_words(self.as_count())


def in_words(count: Mapping[str, Any]) -> str:
    """Return the count ``unconfirmed`` of a run as text, with the commands to type."""
    stale, rows, worker = count["stale"], count["rows"], count["worker"]
    if stale is None:
        found = f"the stale rows of {count['table']} could not be counted in time"
    else:
        size = "" if rows is None else f" of about {rows:,}"
        over = f", over the first run's limit of {count['limit']:,}" if "limit" in count else ""  # old runs have none
        found = f"{'' if count['exact'] else 'at least '}{stale:,}{size} rows of {count['table']} are stale{over}"
    if count.get("changed"):
        why = "its predicate, its age or its table has changed since the last completed run"
    else:
        why = "no run of this worker has completed yet"
    return (
        f"{found}, and {why}: its runs are skipped until one is confirmed. Look: "
        f"housekeeping plan {worker}; then: housekeeping run {worker} --confirm"
    )


@dataclass(frozen=True, slots=True)
class FirstRun:
    """Result of the check.

    Attributes:
      unconfirmed: Why the run needs a confirmation; None if it needs none.
      fingerprint: What the run writes into its row once it has completed; None if that is known already.
    """

    unconfirmed: Unconfirmed | None = None
    fingerprint: str | None = None


def check_first_run(
    sweep: Sweep, stages: Sequence[Stage], now: datetime, argument: Any = None, *, confirmed: bool = False
) -> FirstRun:
    """Return whether the run needs a confirmation: the sweep's first one, or the first of a changed predicate.

    Counts the rows and the stale rows of each table up to 100,000.

    Raises:
      peewee.PeeweeException: The database does not answer, or the library's own tables are missing.
    """
    if not sweep.confirm_first_run:
        return FirstRun()
    current, last = fingerprint(sweep, stages), run_queries.last_predicate(sweep.name)
    if last is not None and last[0] == current:
        return FirstRun(fingerprint=None if last[1] else current)
    # A run of an earlier version has completed without a fingerprint.
    if confirmed or (last is None and run_queries.has_worked(sweep.name)):
        return FirstRun(fingerprint=current)
    unconfirmed = _exceeding_table(sweep, stages, now, argument, changed=last is not None)
    return FirstRun(unconfirmed, current)


def _exceeding_table(
    sweep: Sweep, stages: Sequence[Stage], now: datetime, argument: Any, *, changed: bool
) -> Unconfirmed | None:
    tables: dict[str, list[Stage]] = {}
    for each in stages:
        if isinstance(each, TableStage):
            tables.setdefault(quoted_name(each.model), []).append(each)
        elif isinstance(each, PartitionStage) and (found := _exceeding_partitions(sweep, each, now, argument, changed)):
            return found
    for table, table_stages in tables.items():
        rows = _rows_of(sweep, table)
        limit = max(AT_LEAST - 1, (rows or 0) // ONE_IN)
        stale = _stale(sweep, table_stages, now, limit, argument)
        if stale is not None and not stale.exact:
            # The limit was found to be exceeded; the operator needs to know by how much.
            stale = _stale(sweep, table_stages, now, _COUNTED, argument) or Backlog(stale.rows + 1, exact=False)
        if stale is None or stale.rows > limit:
            return Unconfirmed(with_argument(sweep.name, argument), table, stale, limit, rows, changed)
    return None


def _exceeding_partitions(
    sweep: Sweep, stage: PartitionStage, now: datetime, argument: Any, changed: bool
) -> Unconfirmed | None:
    """Compare the rows of the partitions whose range is over with those of the table."""
    candidates = stage.candidates(now)
    ended = {each.partition.id for each in candidates.all()}
    rows = {each.id: _rows_in(sweep, each) for each in candidates.table.partitions}
    stale, total = sum(number for id, number in rows.items() if id in ended), sum(rows.values())
    limit = max(AT_LEAST - 1, total // ONE_IN)
    if stale <= limit:
        return None
    worker = with_argument(sweep.name, argument)
    return Unconfirmed(worker, quoted_name(stage.model), Backlog(stale), limit, total, changed)


def _rows_in(sweep: Sweep, partition: Partition) -> int:
    if partition.rows is not None:
        return partition.rows
    try:
        return _rows_of(sweep, partition.name.replace("%", "%%")) or 0
    except ProgrammingError as error:
        if not is_gone(error):
            raise
        return 0  # another session has dropped it meanwhile


def _rows_of(sweep: Sweep, table: str) -> int | None:
    try:
        counted = count_rows(table, _COUNTED, sweep.max_runtime)
    except CountFailed as error:
        _raise_unless_timed_out(error)
        logger.warning("Could not count the rows of a table", table=table, error=str(error))
        return estimated_rows([table])
    return counted if counted < _COUNTED else max(counted, estimated_rows([table]) or 0)


def _stale(sweep: Sweep, table_stages: Sequence[Stage], now: datetime, limit: int, argument: Any) -> Backlog | None:
    try:
        return count_stale(table_stages, now, limit, argument, sweep.max_runtime)
    except CountFailed as error:
        _raise_unless_timed_out(error)
        logger.warning("Could not count the stale rows before a first run", error=str(error))
        return None


def _raise_unless_timed_out(error: CountFailed) -> None:
    # The run would fail with the same error, because it sends the same predicate.
    if not error.timed_out and error.__cause__ is not None:
        raise error.__cause__
