"""Times in PostgreSQL: column types in UTC, the time of a statement, and how far this machine's clock is off."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from peewee import SQL, DateTimeField, Model, fn

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.redis import shared_redis, translate_redis_errors
from housekeeping.database.connection import database

if TYPE_CHECKING:
    import redis


#: A larger difference raises an alert.
TOLERATED: Final = timedelta(seconds=5)
#: With a larger difference no run starts unless it is forced. The shortest period of a schedule: a clock that is
#: further off sends ticks that the others have done or not reached.
REFUSED: Final = timedelta(minutes=1)

DATABASE: Final = "the database"
REDIS: Final = "Redis"


@dataclass(frozen=True, slots=True)
class ClockSkew:
    """Difference between this machine's clock and a server's.

    Attributes:
      server_at: The server's time.
      ahead: Least possible lead of this machine over the server; negative if it is behind.
      server: What the server is called.
    """

    server_at: datetime
    ahead: timedelta
    server: str = DATABASE

    @classmethod
    def between(cls, before: datetime, server_at: datetime, after: datetime, server: str = DATABASE) -> ClockSkew:
        """Return the difference, given this machine's times before and after the server answered.

        It is zero if the server's time is between the two, so that a slow answer raises no alert.
        """
        # Sorted, because this machine's clock may have been set back in between.
        earliest, latest = sorted((before, after))
        ahead = max(earliest - server_at, timedelta()) - max(server_at - latest, timedelta())
        return cls(server_at, ahead, server)

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
            f"this machine ({socket.gethostname()}) says {here:%Y-%m-%d %H:%M:%S} UTC, {self.server} "
            f"{self.server_at:%Y-%m-%d %H:%M:%S} UTC: {abs(self.seconds):,.1f} s {side} {self.server}; "
            f"check NTP on this machine and on {self.server}'s"
        )


def read_database_clock() -> ClockSkew:
    """Compare this machine's clock with the database's; one round trip."""
    before = SYSTEM_CLOCK.now()
    server_at = database.execute_sql("SELECT clock_timestamp()").fetchone()[0]
    return ClockSkew.between(before, server_at.astimezone(UTC), SYSTEM_CLOCK.now())


def read_redis_clock(client: redis.Redis | None = None) -> ClockSkew:
    """Compare this machine's clock with that of Redis; one round trip.

    Parameters:
      client: Default: the shared client.

    Raises:
      RedisUnavailable: When Redis does not answer.
    """
    before = SYSTEM_CLOCK.now()
    with translate_redis_errors():
        seconds, micro = (client or shared_redis.get()).time()
    at = datetime.fromtimestamp(seconds, UTC) + timedelta(microseconds=micro)
    return ClockSkew.between(before, at, SYSTEM_CLOCK.now(), REDIS)


def database_now() -> datetime:
    """Return the database's time in UTC; one round trip."""
    return read_database_clock().server_at


class UtcDateTimeField(DateTimeField):
    """``timestamptz`` column that rejects naive datetimes and reads as UTC.

    Raises:
      ValueError: If a datetime without a timezone is written or compared.
    """

    field_type = "TIMESTAMPTZ"

    def db_value(self, value: datetime | None) -> Any:
        if value is not None and value.tzinfo is None:
            raise ValueError(f"{self.name}: {value!r} has no timezone")
        return value

    def python_value(self, value: Any) -> Any:
        value = super().python_value(value)
        return value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value


class NaiveUtcDateTimeField(UtcDateTimeField):
    """``timestamp`` column without time zone that contains UTC; rejects naive datetimes and reads as UTC.

    Values that are compared with it are converted to UTC here. PostgreSQL would convert them to the time zone of the
    session, and every age would be wrong by the offset of that zone.
    """

    field_type = "TIMESTAMP"

    def db_value(self, value: datetime | None) -> Any:
        value = super().db_value(value)
        return value and value.astimezone(UTC).replace(tzinfo=None)

    def python_value(self, value: Any) -> Any:
        value = super().python_value(value)
        return value.replace(tzinfo=UTC) if isinstance(value, datetime) else value


class StatementTime(SQL):
    """SQL for the time of the statement; add a `timedelta` for a later time, subtract one for an earlier time.

    An expression and not a `datetime`, because a run compiles its statements once and executes them for each batch.
    """

    def __init__(self, offset: timedelta = timedelta()) -> None:
        self.offset = offset
        if offset:
            super().__init__("(statement_timestamp() + %s)", (offset,))
        else:
            super().__init__("statement_timestamp()")

    def __add__(self, other: Any) -> Any:
        return StatementTime(self.offset + other) if isinstance(other, timedelta) else super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        return self + other if isinstance(other, timedelta) else super().__radd__(other)

    def __sub__(self, other: Any) -> Any:
        return self + -other if isinstance(other, timedelta) else super().__sub__(other)


STATEMENT_TIME: Final = StatementTime()


def statement_time(column: Any) -> Any:
    """Return SQL for the time of the statement, as the column stores it."""
    return as_stored(column, STATEMENT_TIME)


def as_stored(column: Any, value: Any) -> Any:
    """Return the value to write; a `StatementTime` becomes UTC if the column has no time zone."""
    if isinstance(value, StatementTime) and isinstance(column, NaiveUtcDateTimeField):
        return fn.TIMEZONE("UTC", value)
    return value


def all_as_stored(model: type[Model], changes: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the changes, column or its name -> value, with each value `as_stored`."""
    columns: Mapping[str, Any] = model._meta.combined
    return {
        column: as_stored(columns.get(column) if isinstance(column, str) else column, value)
        for column, value in changes.items()
    }
