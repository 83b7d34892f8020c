"""Clock whose time is set by a test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class ManualClock:
    """Clock that only moves when it is advanced.

    Parameters:
      now: The start time; timezone-aware.
      tick: Time to advance on each call of `monotonic`.
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
        """Advance the clock."""
        self._elapsed += by
