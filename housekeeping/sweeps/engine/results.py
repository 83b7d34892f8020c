"""Result of one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from housekeeping.core.errors import BreakerTripped, HousekeepingError, RunTakenOver
from housekeeping.sweeps.ledger.runs import Counts, Outcome


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of one run, as its row in the ledger has it.

    Attributes:
      run_id: Id of its row; None for a dry run, or if the database could not be reached.
      reason: Reason of the outcome; None for a plain ``done``.
      duration_s: Seconds, by the monotonic clock.
      error: The exception that ended it; not part of the JSON form.
      retry_after: Delay until the message is delivered again, if its own dead attempt holds the lease. Not part of
        the JSON form.
    """

    worker: str
    outcome: Outcome
    reason: str | None
    run_id: int | None
    started_at: datetime
    duration_s: float
    counts: Counts
    dry_run: bool = False
    error: BaseException | None = field(default=None, compare=False)
    retry_after: timedelta | None = field(default=None, compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return the result object of ``housekeeping run --json``."""
        return {
            "worker": self.worker,
            "outcome": self.outcome,
            "reason": self.reason,
            "run_id": self.run_id,
            "started_at": self.started_at.isoformat(),
            "duration_s": round(self.duration_s, 3),
            "counts": self.counts,
            "dry_run": self.dry_run,
        }

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 for done, partial and skipped, 1 for failed and lost_lease."""
        return 0 if self.outcome in ("done", "partial", "skipped") else 1

    def raise_for_failure(self) -> None:
        """Raise the error that ended the run, so that its message is retried.

        A run that was taken over raises nothing: its actor requeues the message. Nor does a run that its breaker
        stopped: retries would be stopped as well until an operator confirms a run.
        """
        if self.error is None or isinstance(self.error, RunTakenOver | BreakerTripped):
            return
        if isinstance(self.error, Exception | KeyboardInterrupt):
            raise self.error
        raise HousekeepingError(f"{self.worker}: {self.reason}") from self.error
