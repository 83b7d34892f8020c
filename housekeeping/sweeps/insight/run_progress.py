"""Progress of an open run: processed rows of all, rows per second, time left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.clock_skew import database_now
from housekeeping.sweeps.checks.unique_keys import stages_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.status import WorkerStatus, is_lost
from housekeeping.sweeps.limits.bounded_counts import count_stale
from housekeeping.sweeps.limits.breaker import processed_rows
from housekeeping.sweeps.stages.stage import Backlog

logger = named_logger(__name__)

#: Rows counted at most; the count's time limit usually ends it earlier.
_COUNTED: Final = 10_000_000
#: Shorter runs are over before their progress is of use, so their rows are not counted.
_MIN_DURATION: Final = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of an open run.

    Attributes:
      run_id: Its row in the ledger; None if unknown.
      done: The processed rows.
      total: The processed and the stale rows; None if not counted.
      elapsed_s: Seconds from the run's start until `done` was counted.
      limit_s: Seconds after which the run starts no new batch.
    """

    run_id: int | None
    done: int
    total: Backlog | None
    elapsed_s: float
    limit_s: float

    @property
    def rows_per_s(self) -> float | None:
        """Processed rows per second, on average; None before the first row."""
        return self.done / self.elapsed_s if self.done and self.elapsed_s > 0 else None

    @property
    def share(self) -> float | None:
        """The processed share of all rows, from 0 to 1; None if unknown."""
        if self.total is None or not self.total.exact:
            return None
        return min(1.0, self.done / self.total.rows) if self.total.rows else 1.0

    @property
    def left_s(self) -> float | None:
        """Expected seconds until nothing is left, at least those of the counted rows; None if unknown."""
        if self.total is None or self.rows_per_s is None:
            return None
        return max(0, self.total.rows - self.done) / self.rows_per_s

    @property
    def needs_more_runs(self) -> bool:
        """Whether the run is expected to reach its time limit before nothing is left."""
        return self.left_s is not None and self.elapsed_s + self.left_s > self.limit_s


def progress_of(
    sweep: Sweep, counts: dict[str, Any], total: Backlog | None, elapsed_s: float, run_id: int | None = None
) -> Progress:
    """Return the progress of a run with these counts."""
    done = processed_rows(counts, sweep.progress_counts)
    return Progress(run_id, done, total, elapsed_s, sweep.max_runtime.total_seconds())


def count_left(sweep: Sweep, now: datetime | None = None, argument: Any = None) -> Backlog | None:
    """Count the stale rows that a run has before it; None if that fails, takes too long or has no meaning.

    The rows of a run with shards are not its own alone, and not all stages of a custom sweep count what they process.

    Parameters:
      now: The time at which the run began; None for the database's time.
    """
    if sweep.shards > 1 or not sweep.progress_counts:
        return None
    try:
        return count_stale(stages_of(sweep), now or database_now(), _COUNTED, argument, sweep.max_runtime)
    except Exception as error:  # a predicate may raise anything, and the run shows it
        logger.debug("Could not count the rows of a run", error=error_line(error))
        return None


class ProgressReader:
    """Reader of the progress of open runs. Counts the rows of each run once."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, int], Backlog | None] = {}

    def read(self, found: Iterable[tuple[Sweep, WorkerStatus]], now: datetime) -> dict[str, Progress]:
        """Return the progress of each worker's last run, if it is open and has run for five seconds."""
        progress: dict[str, Progress] = {}
        open_runs = set()
        for sweep, status in found:
            last = status.last_run
            if last is None or last["outcome"] is not None or is_lost(None, last["heartbeat_age_s"]):
                continue
            elapsed = now - datetime.fromisoformat(last["started_at"])
            if elapsed < _MIN_DURATION:
                continue
            run = (sweep.database, last["run_id"])
            open_runs.add(run)
            if run not in self._totals:
                self._totals[run] = self._total(sweep, last)
            elapsed_s = elapsed.total_seconds() - (last["heartbeat_age_s"] or 0.0)
            progress[sweep.name] = progress_of(sweep, last["counts"], self._totals[run], elapsed_s, last["run_id"])
        self._totals = {run: total for run, total in self._totals.items() if run in open_runs}
        return progress

    @staticmethod
    def _total(sweep: Sweep, last: dict[str, Any]) -> Backlog | None:
        if sweep.argument_name is not None:  # the ledger does not have the argument
            return None
        left = count_left(sweep, datetime.fromisoformat(last["started_at"]))
        return None if left is None else left + Backlog(processed_rows(last["counts"], sweep.progress_counts))
