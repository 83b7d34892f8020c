"""The peewee field for a column's type in PostgreSQL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from peewee import (
    BigIntegerField,
    BooleanField,
    DateField,
    DecimalField,
    DoubleField,
    Field,
    FloatField,
    IntegerField,
    JSONField,
    SmallIntegerField,
    TextField,
    TimeField,
    UUIDField,
)
from playhouse.postgres_ext import ArrayField

from housekeeping.database.times import NaiveUtcDateTimeField, UtcDateTimeField

#: Type -> field; any other type is an `SqlField`.
_FIELDS: Final[dict[str, type[Field]]] = {
    **dict.fromkeys(("smallint", "int2", "smallserial"), SmallIntegerField),
    **dict.fromkeys(("integer", "int", "int4", "serial"), IntegerField),
    **dict.fromkeys(("bigint", "int8", "bigserial"), BigIntegerField),
    **dict.fromkeys(("text", "character varying", "varchar", "character", "char", "bpchar", "citext"), TextField),
    **dict.fromkeys(("timestamp with time zone", "timestamptz"), UtcDateTimeField),
    **dict.fromkeys(("timestamp without time zone", "timestamp"), NaiveUtcDateTimeField),
    **dict.fromkeys(("time without time zone", "time"), TimeField),
    **dict.fromkeys(("numeric", "decimal"), DecimalField),
    **dict.fromkeys(("double precision", "float8", "float"), DoubleField),
    **dict.fromkeys(("real", "float4"), FloatField),
    **dict.fromkeys(("boolean", "bool"), BooleanField),
    **dict.fromkeys(("json", "jsonb"), JSONField),
    "date": DateField,
    "uuid": UUIDField,
}
#: numeric(10, 2), timestamp(3) with time zone, varchar(30) COLLATE "C".
_MODIFIER: Final = re.compile(r"\s*\([^)]*\)|\s+collate\s+.*$", re.IGNORECASE)
_ARRAY: Final = re.compile(r"(.+?)\s*((?:\[\d*\])+)")


class SqlField(Field):
    """A column of any type. Values go to PostgreSQL as they are and come back as the driver reads them.

    The driver reads a type it does not know as the text that PostgreSQL writes.
    """

    def __init__(self, sql_type: str, **options: Any) -> None:
        self.field_type = sql_type  # type: ignore[misc]  # of the class in peewee's stubs
        super().__init__(**options)

    def python_value(self, value: Any) -> Any:
        return value.tobytes() if isinstance(value, memoryview) else value


class EnumField(TextField):
    """A column that stores the members of an enumeration as texts; reads as the stored text.

    Parameters:
      labels: Member, and its value -> stored text.
    """

    def __init__(self, labels: Mapping[Any, str], **options: Any) -> None:
        self._labels = labels
        self._stored = frozenset(labels.values())
        super().__init__(**options)

    def db_value(self, value: Any) -> Any:
        # A stored text comes first: it may be the value of another member as well.
        return value if isinstance(value, str) and value in self._stored else self._labels.get(value, value)


def field_of(sql_type: str, labels: Mapping[Any, str], **options: Any) -> Any:
    """Return a new field for a column of this type.

    Parameters:
      labels: For an enumeration, see `EnumField`; else empty.
      options: The field's other arguments.
    """
    if labels:
        return EnumField(labels, **options)
    plain = _MODIFIER.sub("", sql_type).strip()
    if array := _ARRAY.fullmatch(plain):
        element, dimensions = array[1], array[2].count("[")
        return ArrayField(SqlField, {"sql_type": element}, dimensions=dimensions, index=False, **options)
    kind = _FIELDS.get(plain.lower())
    return SqlField(plain, **options) if kind is None else kind(**options)
