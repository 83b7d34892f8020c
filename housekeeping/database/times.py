"""Times in PostgreSQL: a column type without time zone, the time of a statement, and dates that Python lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from peewee import SQL, DateTimeField, Model, fn
from psycopg2 import extensions


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


def read_extreme_times(connection: Any) -> None:
    """Let the connection read a date or time outside of Python's range as the nearest one within it.

    PostgreSQL can store the year 10000 or 44 BC. psycopg2 raises ValueError for it, which would end a run at a row that
    its statement can delete. It already reads infinity as the nearest date.
    """
    for base, smallest, largest in (
        (extensions.PYDATE, date.min, date.max),
        (extensions.PYDATETIME, datetime.min, datetime.max),  # noqa: DTZ901 a timestamp without zone
        (extensions.PYDATETIMETZ, datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)),
    ):
        caster = extensions.new_type(base.values, base.name, _nearest(base, smallest, largest))
        extensions.register_type(caster, connection)


def _nearest(read: Any, smallest: date, largest: date) -> Callable[[str | None, Any], Any]:
    def nearest(value: str | None, cursor: Any) -> Any:
        try:
            return read(value, cursor)
        except (ValueError, OverflowError):
            assert value is not None
            # For example "0044-03-15 00:00:00+00 BC". Near year 1, a time in another zone can be in the year before.
            return smallest if value.endswith(" BC") or value.startswith("0001") else largest

    return nearest
