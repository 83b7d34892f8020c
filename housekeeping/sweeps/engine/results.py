"""What one run did, as its caller sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from housekeeping.core.errors import BreakerTripped, HousekeepingError, RunTakenOver
from housekeeping.sweeps.ledger.runs import Counts, Outcome


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run did; the same facts as its row in the ledger.

    Attributes:
      run_id: Its row; null for a dry run, or when the database could not be reached.
      reason: Why it ended so; null for a plain ``done``.
      duration_s: Seconds, by the monotonic clock of the machine that ran it.
      error: What broke it off; not part of the JSON form.
      retry_after: When the message is to come back, for one that met the lease of its own dead attempt; likewise.
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
        """The result object of ``housekeeping run --json``."""
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
        """0 for done, partial and skipped; 1 for failed and lost_lease."""
        return 0 if self.outcome in ("done", "partial", "skipped") else 1

    def raise_for_failure(self) -> None:
        """Raise what broke the run off, so that its message is retried; nothing when it ended well.

        A run that was taken over raises nothing here: its actor puts the message back. Nor does one that its
        breaker stopped: until somebody confirms it, each retry would be stopped as well, and the next tick asks anew.
        """
        if self.error is None or isinstance(self.error, RunTakenOver | BreakerTripped):
            return
        if isinstance(self.error, Exception | KeyboardInterrupt):
            raise self.error
        raise HousekeepingError(f"{self.worker}: {self.reason}") from self.error
