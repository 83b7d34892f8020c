"""Time of a change: the database's time when the statement arrives there."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from peewee import SQL, Model, fn

from housekeeping.database.naive_time import NaiveUtcDateTimeField


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
