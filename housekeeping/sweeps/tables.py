"""Tables that are declared elsewhere, or in the catalog, as peewee models, and their columns by name."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
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
    PeeweeException,
    SmallIntegerField,
    TextField,
    TimeField,
    UUIDField,
)

from housekeeping.core.errors import DeclarationError
from housekeeping.core.logs import described, error_line
from housekeeping.database.connection import BaseModel, database
from housekeeping.database.errors import sqlstate
from housekeeping.database.queries import NaiveUtcDateTimeField, UtcDateTimeField
from housekeeping.sweeps.conditions import column_of, without

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
class TableColumn:
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
    columns: Sequence[TableColumn]
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
        from playhouse.postgres_ext import ArrayField

        return ArrayField(SqlField, {"sql_type": element}, dimensions=dimensions, index=False, **options)
    kind = _FIELDS.get(plain.lower())
    return SqlField(plain, **options) if kind is None else kind(**options)


_READ: Final = """
SELECT nspname::text, relname::text, relkind::text, (
    SELECT json_agg(json_build_array(attname, format_type(atttypid, atttypmod), NOT attnotnull) ORDER BY attnum)
    FROM pg_attribute WHERE attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped
), (
    SELECT json_agg(attname ORDER BY place)
    FROM pg_index, unnest(indkey::smallint[]) WITH ORDINALITY AS key (number, place)
    JOIN pg_attribute ON attnum = number
    WHERE indrelid = pg_class.oid AND indisprimary AND attrelid = pg_class.oid AND place <= indnkeyatts
)
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE pg_class.oid = to_regclass(%s)
"""
_TABLES: Final = ("r", "p")
_KINDS: Final = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence", "i": "an index"}
_SYSTEM: Final = ("pg_catalog", "information_schema", "pg_toast")
_NOT_A_NAME: Final = ("42601", "42602", "0A000")  # SQLSTATEs of to_regclass


def describe(name: str) -> TableDescription:
    """Return the description of a table in the current database.

    Raises:
      DeclarationError: There is no such table, it has no primary key, or it belongs to PostgreSQL.
      peewee.PeeweeException: The catalog cannot be read.
    """
    try:
        row: Any = database.execute_sql(_READ, (name,)).fetchone()
    except PeeweeException as error:
        if sqlstate(error) not in _NOT_A_NAME:
            raise
        raise DeclarationError(f"{name!r} is no name of a table: {error_line(error)}") from None
    if row is None:
        quotes = f", and capitals in quotes: '\"{name}\"'" if name != name.lower() and '"' not in name else ""
        raise DeclarationError(f"there is no table {name!r}; write it as in SQL, with its schema if needed{quotes}")
    schema, table, kind, columns, key = row
    if kind not in _TABLES:
        raise DeclarationError(f"{name} is {_KINDS.get(kind, 'no table')}; name a table")
    if schema in _SYSTEM:
        raise DeclarationError(f"{name} is a table of PostgreSQL itself")
    for part in (schema, table, *(column for column, *_ in columns)):
        if "%" in part:  # the driver would take it for a parameter
            raise DeclarationError(f"{name} has a percent sign in the name {part!r}, which is not supported")
    described = [TableColumn(column, column, sql_type, null) for column, sql_type, null in columns]
    return TableDescription(table, schema, table, described, key or [])


def column_named(sweep: str, model: type[Model], name: object) -> Field:
    """Return the column with this name, in the model or in the database.

    Raises:
      DeclarationError: When there is none, listing the columns; or when the name is not a text.
    """
    if not isinstance(name, str):
        raise DeclarationError(f"{sweep}: {_described(name)} is no name of a column; write it as text{_as_text(name)}")
    column = column_of(model, name)
    if column is None:
        raise DeclarationError(f"{sweep}: {without(model, name)}")
    return column


def keyset_order(sweep: str, model: type[Model], names: str | Sequence[str]) -> tuple[Field, ...]:
    """Return the columns with these names, then those of the primary key that are not among them.

    Raises:
      DeclarationError: When there is no such column.
    """
    meta: Any = model._meta
    given = names if isinstance(names, list | tuple) else [names]
    named = [column_named(sweep, model, name) for name in given]
    found: list[Field] = []
    for column in (*named, *meta.get_primary_keys()):
        if not any(column is each for each in found):
            found.append(column)
    return tuple(found)


def _described(column: object) -> str:
    owner = getattr(getattr(column, "class_", None) or getattr(column, "model", None), "__name__", None)
    name = _name_of(column)
    if name is None:
        return f"an object of type {type(column).__name__}"
    return name if owner is None else f"{owner}.{name}"


def _as_text(column: object) -> str:
    name = _name_of(column)
    return "" if name is None else f': "{name}"'


def _name_of(column: object) -> str | None:
    """Return the name of a column of SQLAlchemy, Django or peewee."""
    field = getattr(column, "field", None)  # of Django
    found = (getattr(field, "attname", None), getattr(column, "key", None), getattr(column, "name", None))
    return next((name for name in found if isinstance(name, str)), None)


#: A module that is imported wherever an object of its library is, and the module here that reads such objects.
_READERS: Final = {"django.db.models": "django_models", "sqlalchemy": "sqlalchemy_tables"}


def model_of(table: object) -> type[Any]:
    """Return the peewee model of a table that the application has declared elsewhere; one model for each.

    ::

        Order = model_of(shop.models.Order)
        machine = StateMachine(Order.status, Status, {"expire": ([Status.OPEN], Status.EXPIRED)})

    Parameters:
      table: A Django model, a SQLAlchemy `Table`, a class mapped by SQLAlchemy, the name of a table, or a model derived
        from `housekeeping.BaseModel`, which is returned as it is.

    Raises:
      DeclarationError: When it is something else, or its rows cannot be swept through one table with a primary key.
      peewee.PeeweeException: The catalog cannot be read for a name.
    """
    if isinstance(table, str):
        return _named(table, database.obj, getattr(database.obj, "catalog_errors", 0))
    if isinstance(table, type) and issubclass(table, Model):
        return table
    model = _built(table) if isinstance(table, Hashable) else None
    if model is None:
        raise DeclarationError(
            f"{described(table)} is no table; it should be a Django model, a SQLAlchemy Table or mapped class, a "
            'model derived from housekeeping.BaseModel, or a name such as "public.session"'
        )
    return model


@dataclass(frozen=True, slots=True)
class OrmRule:
    """What an ORM does with the rows of a table when it deletes the row that they refer to.

    Attributes:
      table: Name of the table, without its schema.
      columns: The referencing columns, by their names in the database.
      decision: ``delete``, ``clear`` or ``keep``.
      text: Where the rule is declared, and its wording there.
    """

    table: str
    columns: tuple[str, ...]
    decision: str
    text: str


def orm_rules(tables: Iterable[object]) -> list[OrmRule]:
    """Return the rules of the ORMs that the process has imported.

    Parameters:
      tables: Tables as sweeps declare them, through which the other classes of SQLAlchemy are found.
    """
    declared = list(tables)
    readers = [name for library, name in _READERS.items() if library in sys.modules]
    modules = [importlib.import_module(f"housekeeping.sweeps.{name}") for name in readers]
    return [rule for module in modules for rule in module.rules(declared)]


@cache
def _named(name: str, _database: object, _catalog_errors: int) -> type[Model]:
    """Read a table again once a statement on the database has named a column that does not exist."""
    return build_model(describe(name))


@cache
def _built(table: object) -> type[Model] | None:
    for library, reader in _READERS.items():
        if library in sys.modules:
            described = importlib.import_module(f"housekeeping.sweeps.{reader}").describe(table)
            if described is not None:
                return build_model(described)
    return None
