"""Columns whose times are in UTC without saying so."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from peewee import DateTimeField


class NaiveUtcDateTimeField(DateTimeField):
    """A ``timestamp`` column without time zone that holds UTC; refuses naive datetimes and reads as UTC.

    What is compared with it loses its zone here, not in the database: there it would be moved into the zone of
    the session first, and every age would be wrong by that zone's offset.

    Raises:
      ValueError: On writing or comparing with a datetime that has no timezone.
    """

    field_type = "TIMESTAMP"

    def db_value(self, value: datetime | None) -> Any:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{self.name}: {value!r} has no timezone")
        return value.astimezone(UTC).replace(tzinfo=None)

    def python_value(self, value: Any) -> Any:
        value = super().python_value(value)
        if not isinstance(value, datetime):
            return value
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
