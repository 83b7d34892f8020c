"""Whether an open run is running, or lost because its process died."""

from __future__ import annotations

from typing import Any, Final

from housekeeping.sweeps.ledger import runs
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.processes.heartbeats import seconds_since

#: SQL: seconds since a run's last heartbeat, by the database's clock.
HEARTBEAT_AGE_S: Final[Any] = seconds_since(Run.heartbeat_at)


def is_lost(outcome: str | None, heartbeat_age_s: float | None) -> bool:
    """Whether a run is open and has missed three heartbeats."""
    return outcome is None and heartbeat_age_s is not None and heartbeat_age_s > runs.SILENCE.total_seconds()


def outcome_in_words(outcome: str | None, heartbeat_age_s: float | None) -> str:
    """Return a run's outcome; of an open run whether it is running or lost.

    Parameters:
      heartbeat_age_s: The age of its last heartbeat in seconds; None: unknown.
    """
    if is_lost(outcome, heartbeat_age_s):
        return f"lost? no heartbeat for {heartbeat_age_s:,.0f} s"
    return outcome or "running"
