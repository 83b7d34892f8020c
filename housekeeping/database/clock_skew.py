"""Difference between this machine's clock and the database's."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.database.connection import database

#: A larger difference raises an alert.
TOLERATED: Final = timedelta(seconds=5)
#: With a larger difference no run starts unless it is forced. The shortest period of a schedule: a clock that is
#: further off sends ticks that the others have done or not reached.
REFUSED: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class ClockSkew:
    """Difference between this machine's clock and a server's.

    Attributes:
      server_at: The server's time.
      ahead: Least possible lead of this machine over the server; negative if it is behind.
    """

    server_at: datetime
    ahead: timedelta

    @classmethod
    def between(cls, before: datetime, server_at: datetime, after: datetime) -> ClockSkew:
        """Return the difference, given this machine's times before and after the server answered.

        It is zero if the server's time is between the two, so that a slow answer raises no alert.
        """
        # Sorted, because this machine's clock may have been set back in between.
        earliest, latest = sorted((before, after))
        return cls(server_at, max(earliest - server_at, timedelta()) - max(server_at - latest, timedelta()))

    @property
    def seconds(self) -> float:
        """Seconds that this machine is ahead of the server; negative if it is behind."""
        return round(self.ahead.total_seconds(), 3)

    @property
    def exceeded(self) -> bool:
        """Whether the difference is more than the tolerated 5 s."""
        return abs(self.ahead) > TOLERATED

    @property
    def refused(self) -> bool:
        """Whether the difference is more than one minute, so that no run starts."""
        return abs(self.ahead) > REFUSED

    def __str__(self) -> str:
        here = self.server_at + self.ahead
        side = "ahead of" if self.ahead > timedelta() else "behind"
        return (
            f"this machine ({socket.gethostname()}) says {here:%Y-%m-%d %H:%M:%S} UTC, the database "
            f"{self.server_at:%Y-%m-%d %H:%M:%S} UTC: {abs(self.seconds):,.1f} s {side} the database; "
            "check NTP on this machine and on the database's"
        )


def read_database_clock() -> ClockSkew:
    """Compare this machine's clock with the database's; one round trip."""
    before = SYSTEM_CLOCK.now()
    server_at = database.execute_sql("SELECT clock_timestamp()").fetchone()[0]
    return ClockSkew.between(before, server_at.astimezone(UTC), SYSTEM_CLOCK.now())


def database_now() -> datetime:
    """Return the database's time in UTC; one round trip."""
    return read_database_clock().server_at
