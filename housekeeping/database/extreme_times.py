"""Dates and times that PostgreSQL can store and Python cannot represent: year 10000, year 44 BC."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

from psycopg2 import extensions


def read_extreme_times(connection: Any) -> None:
    """Let the connection read a date or time outside of Python's range as the nearest one within it.

    psycopg2 raises ValueError for it, which would end a run at a row that its statement can delete. It already reads
    infinity as the nearest date.
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
