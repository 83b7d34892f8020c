"""Dates and times that PostgreSQL has and Python does not: year 10000, year 44 BC."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

from psycopg2 import extensions


def read_extreme_times(connection: Any) -> None:
    """Let the connection read a date or time that Python lacks as the nearest one it has.

    psycopg2 raises ValueError for it, which would end a run at a row that its statement can delete. It reads infinity
    in this way already.
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
            # "0044-03-15 00:00:00+00 BC"; near year 1, a time in another zone is one of the year before.
            return smallest if value.endswith(" BC") or value.startswith("0001") else largest

    return nearest
