"""Time that a test sets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class ManualClock:
    """A clock that stands still until told otherwise.

    Parameters:
      now: The time it starts at; timezone-aware.
      tick: How far it moves each time elapsed time is read.
    """

    def __init__(self, now: datetime = datetime(2026, 1, 1, tzinfo=UTC), tick: timedelta = timedelta()) -> None:
        self._start = now
        self._elapsed = timedelta()
        self._tick = tick

    def now(self) -> datetime:
        return self._start + self._elapsed

    def monotonic(self) -> float:
        self._elapsed += self._tick
        return self._elapsed.total_seconds()

    def advance(self, by: timedelta) -> None:
        """Let time pass."""
        self._elapsed += by
