"""Column type for UTC times without time zone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from peewee import DateTimeField


class NaiveUtcDateTimeField(DateTimeField):
    """``timestamp`` column without time zone that contains UTC; rejects naive datetimes and reads as UTC.

    Values that are compared with it are converted to UTC here. PostgreSQL would convert them to the time zone of the
    session, and every age would be wrong by the offset of that zone.

    Raises:
      ValueError: If a datetime without a timezone is written or compared.
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
