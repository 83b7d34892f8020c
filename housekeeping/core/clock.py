"""Time, passed in rather than read, so that a test decides what time it is."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol


class Clock(Protocol):
    """Where a run gets the time from."""

    def now(self) -> datetime:
        """The current time in UTC, timezone-aware."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes backwards."""


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()


SYSTEM_CLOCK: Final[Clock] = SystemClock()


class ServerClock:
    """A server's clock, read once; from then on its time passes by this machine's monotonic clock.

    Parameters:
      now: The server's time at this moment.
    """

    def __init__(self, now: datetime) -> None:
        self._read = now
        self._read_at = self.monotonic()

    def now(self) -> datetime:
        return self._read + timedelta(seconds=self.monotonic() - self._read_at)

    def monotonic(self) -> float:
        return time.monotonic()


class RunBudget:
    """How long one run may go on, counted from the moment the budget is made.

    The budget is asked *between* units of work; it never interrupts one. A unit that
    hangs is the business of the database's ``statement_timeout``.

    Parameters:
      limit: The longest a run may last before it stops taking new work.
      clock: Where elapsed time is read from.

    Attributes:
      seen: Seconds spent when it was last asked, for what need not know it better.
    """

    def __init__(self, limit: timedelta, clock: Clock) -> None:
        self._whole = self._limit = limit.total_seconds()
        self._clock = clock
        self._started_at = clock.monotonic()
        self.seen = 0.0

    def narrow(self, most: timedelta | None) -> None:
        """Be no longer than this from now on; null: as long as it was made."""
        self._limit = self._whole if most is None else min(self._whole, most.total_seconds())

    def spent(self) -> float:
        """Seconds since the budget was made."""
        self.seen = self._clock.monotonic() - self._started_at
        return self.seen

    def exceeded(self) -> bool:
        """Whether *more* than the limit has passed; exactly the limit is still inside."""
        return self.spent() > self._limit
