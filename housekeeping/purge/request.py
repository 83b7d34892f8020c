"""Options of a purge, and their form in the ledger."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Final

from housekeeping.core.errors import WrongArgument
from housekeeping.core.settings import MAIN
from housekeeping.core.wording import counted
from housekeeping.sweeps.ledger import history, run_queries, run_start
from housekeeping.sweeps.ledger.history import RunRecord
from housekeeping.sweeps.ledger.runs import PURGE, SILENCE, Counts

#: Rows per batch. A batch locks its rows until it commits, usually after some milliseconds.
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
      archive_to: Table that gets the rows before they are deleted.
      ignore_holds: Whether rows that a declared sweep holds are deleted, too.
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
        """Return the count ``purge`` of the run, as the ledger stores it."""
        stored = asdict(self)
        del stored["database"]  # the one that has the ledger
        return {PURGE: stored}


def request_of(run_id: int) -> PurgeRequest:
    """Return the request that continues a purge in the current database, and close the purge if its process died.

    Raises:
      WrongArgument: The run is no purge, or there is nothing to continue.
    """
    record = _found(run_id)
    request = recorded_request(record)
    if record.lost:
        run_start.close_dead_runs(record.worker)
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
            f"run {record.label} may still be at work; it can be resumed once it has been silent for "
            f"{SILENCE.total_seconds():.0f} s, in {wait_s} s at the earliest"
        )
    later = run_queries.resumed_by(record.run_id)
    if later is not None:
        raise WrongArgument(
            f"run {record.label} was resumed by run {history.run_label(later, record.database)}; resume that one"
        )
