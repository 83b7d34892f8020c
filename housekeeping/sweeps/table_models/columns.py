"""A table as a list of columns, and the peewee model of it with a field for each column's type."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from peewee import (
    BigIntegerField,
    BooleanField,
    CompositeKey,
    DateField,
    DecimalField,
    DoubleField,
    Field,
    FloatField,
    IntegerField,
    JSONField,
    Model,
    ModelBase,
    SmallIntegerField,
    TextField,
    TimeField,
    UUIDField,
)
from playhouse.postgres_ext import ArrayField

from housekeeping.core.errors import DeclarationError
from housekeeping.database.connection import BaseModel
from housekeeping.database.times import NaiveUtcDateTimeField, UtcDateTimeField

#: Names that every model has for itself; `id` is only the key of a model that declares none.
_TAKEN: Final = {*dir(BaseModel), "Meta", "_dirty"} - {"id"}

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


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
      name: The attribute of the model. A name that every peewee model has, such as ``index``, gets a ``_`` at its end.
      column_name: The name in the database.
      sql_type: The type as PostgreSQL or a statement that creates the table writes it, such as ``varchar(30)``.
      null: Whether it may be NULL.
      labels: For an enumeration, its members and their values, each with the text that the column stores.
    """

    name: str
    column_name: str
    sql_type: str
    null: bool
    labels: Mapping[Any, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TableDescription:
    """A table, as another library or the catalog describes it.

    Attributes:
      label: What messages call it; also the name of the model's class.
      schema: Schema of the table; None to look for it in the connection's search path.
      key: The columns of the primary key, in order, by their names in the database.
    """

    label: str
    schema: str | None
    name: str
    columns: Sequence[Column]
    key: Sequence[str]


def build_model(table: TableDescription) -> type[Model]:
    """Return a model of the table, on the library's database handle.

    Raises:
      DeclarationError: When the table has no primary key.
    """
    if not table.key:
        raise DeclarationError(f"{table.label} has no primary key; a sweep needs one, to continue after any row")
    single = table.key[0] if len(table.key) == 1 else None
    namespace: dict[str, Any] = {}
    names: dict[str, str] = {}
    for column in table.columns:
        name = names[column.column_name] = _free(column.name, namespace)
        namespace[name] = field_of(
            column.sql_type,
            column.labels,
            column_name=column.column_name,
            null=column.null,
            primary_key=column.column_name == single,
        )
    meta: dict[str, Any] = {"schema": table.schema, "table_name": table.name, "is_built": True}
    if single is None:
        meta["primary_key"] = CompositeKey(*(names[column] for column in table.key))
    namespace["Meta"] = type("Meta", (), meta)
    model: Any = ModelBase(table.label, (BaseModel,), namespace)
    return cast(type[Model], model)


def is_built(model: type[Model]) -> bool:
    """Return whether `build_model` made the model, so that its columns are declared elsewhere."""
    return bool(getattr(model._meta, "is_built", False))


def _free(name: str, namespace: Mapping[str, Any]) -> str:
    while name in _TAKEN or name in namespace:
        name += "_"
    return name


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
