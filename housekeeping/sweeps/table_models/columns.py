"""A table as a list of columns, and the peewee model of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from peewee import CompositeKey, Model, ModelBase

from housekeeping.core.errors import DeclarationError
from housekeeping.database.connection import BaseModel
from housekeeping.sweeps.table_models.field_types import field_of

#: Names that every model has for itself; `id` is only the key of a model that declares none.
_TAKEN: Final = {*dir(BaseModel), "Meta", "_dirty"} - {"id"}


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
      schema: None: the table is looked for in the connection's search path.
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
