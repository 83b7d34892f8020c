"""Clocks that are passed as arguments, so that a test decides what time it is."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol


class Clock(Protocol):
    """Source of the current time."""

    def now(self) -> datetime:
        """Return the current time in UTC, timezone-aware."""

    def monotonic(self) -> float:
        """Return the seconds since a fixed moment; never goes backwards."""


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()


SYSTEM_CLOCK: Final[Clock] = SystemClock()


class ServerClock(SystemClock):
    """A server's clock that was read once and advances with this machine's monotonic clock.

    Parameters:
      now: The server's current time.
    """

    def __init__(self, now: datetime) -> None:
        self._read = now
        self._read_at = self.monotonic()

    def now(self) -> datetime:
        return self._read + timedelta(seconds=self.monotonic() - self._read_at)


class RunBudget:
    """Time limit of one run, measured from the construction of this object.

    A run checks it *between* units of work. It never interrupts one: a statement that hangs is ended by the database's
    ``statement_timeout``.

    Parameters:
      limit: The maximum time until a run stops taking new work.
      clock: Source of the elapsed time.

    Attributes:
      seen: Seconds elapsed at the last call of `spent` or `exceeded`.
    """

    def __init__(self, limit: timedelta, clock: Clock) -> None:
        self._configured_s = self._limit_s = limit.total_seconds()
        self._clock = clock
        self._started_at = clock.monotonic()
        self.seen = 0.0

    def narrow(self, limit: timedelta | None) -> None:
        """Lower the limit for now; None restores the configured one."""
        self._limit_s = self._configured_s if limit is None else min(self._configured_s, limit.total_seconds())

    def spent(self) -> float:
        """Return the seconds since construction."""
        self.seen = self._clock.monotonic() - self._started_at
        return self.seen

    def share(self) -> float:
        """Return the elapsed share of the limit: 1 when it is reached, more after that."""
        return self.spent() / self._limit_s

    def left(self) -> float:
        """Return the seconds until the limit; negative after it."""
        return self._limit_s - self.spent()

    def exceeded(self) -> bool:
        """Return whether *more* than the limit has elapsed; exactly the limit has not."""
        return self.spent() > self._limit_s
