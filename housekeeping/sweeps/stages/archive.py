"""Archive of a table: the table that takes the rows which a sweep deletes, and the statement that moves them.

One statement deletes the rows and inserts them into the archive, so that each commit has a row in exactly one of the
two tables.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

from peewee import (
    CTE,
    OP,
    SQL,
    AutoField,
    BigAutoField,
    BigIntegerField,
    Column,
    CompositeKey,
    Expression,
    Field,
    ForeignKeyField,
    IntegerField,
    Model,
    ModelBase,
    ModelInsert,
    Select,
    Value,
    fn,
)

from housekeeping.core.errors import DeclarationError
from housekeeping.database.catalog import quoted_name
from housekeeping.database.column_types import read_columns
from housekeeping.database.connection import BaseModel
from housekeeping.database.primary_key import key_of
from housekeeping.database.times import UtcDateTimeField

if TYPE_CHECKING:
    from housekeeping.sweeps.stages.table_stage import TableStage

#: Columns that an archive has besides those of its table.
ARCHIVED_AT: Final = "archived_at"
ARCHIVED_BY_RUN: Final = "archived_by_run"
ADDED: Final = (ARCHIVED_AT, ARCHIVED_BY_RUN)
#: Name of the count of rows that were inserted into an archive.
ARCHIVED_ROWS: Final = "archived_rows"

_TABLE: Final = re.compile(r'(?:([^\s."]+)\.)?([^\s."]+)')
_COLUMNS_NOW: Final = (
    "(SELECT array_agg(attname::text ORDER BY attnum) FROM pg_catalog.pg_attribute "
    "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped)"
)


def archive_model(source: type[Model], archive_to: str | type[Model]) -> type[Any]:
    """Return the model of an archive, with the key of its rows; one model for each archive of a table.

    Parameters:
      archive_to: The table's name, with its schema or without, or any peewee model of it.

    Raises:
      DeclarationError: The text is no name of a table, or the source has a column that the archive adds.
    """
    if isinstance(archive_to, str):
        return _model(source, *parsed_name(archive_to))
    meta: Any = archive_to._meta
    return _model(source, meta.schema, meta.table_name)


def parsed_name(table: str) -> tuple[str | None, str]:
    """Return schema and name of a table.

    Raises:
      DeclarationError: The text is no name of a table.
    """
    match = _TABLE.fullmatch(table)
    if match is None:
        raise DeclarationError(f'archive_to is {table!r}; write the name of a table: "archive.sessions"')
    return match[1], match[2]


@cache
def _model(source: type[Model], schema: str | None, table: str) -> type[Any]:
    key = key_of(source)
    if taken := [each.column_name for each in key if each.column_name in ADDED]:
        raise DeclarationError(f"{source.__name__} has the key column {taken[0]}, a name that its archive uses itself")
    fields: dict[str, Any] = {
        ARCHIVED_BY_RUN: BigIntegerField(),
        ARCHIVED_AT: UtcDateTimeField(),
        **{each.name: _plain(each) for each in key},
    }
    names = {"schema": schema, "table_name": table, "primary_key": CompositeKey(*fields), "is_built": True}
    namespace = {**fields, "Meta": type("Meta", (), names), "__module__": __name__}
    model: Any = ModelBase(f"{source.__name__}Archive", (BaseModel,), namespace)
    return cast(type[Any], model)


def _plain(field: Field) -> Field:
    """Return a field for the same values, without a sequence or a reference of its own."""
    name = field.column_name
    while isinstance(field, ForeignKeyField):
        field = field.rel_field
    if isinstance(field, AutoField):
        return BigIntegerField(column_name=name) if isinstance(field, BigAutoField) else IntegerField(column_name=name)
    plain = copy.copy(field)
    plain.primary_key = plain.unique = plain.index = False
    plain.column_name = name
    return plain


def columns_of_table(model: type[Model]) -> tuple[str, ...]:
    """Return all columns that the table has now. If it does not exist, return those of its model."""
    found = tuple(column.name for column in read_columns(model))
    return found or declared_columns(model)


def declared_columns(model: type[Model]) -> tuple[str, ...]:
    """Return the columns of the model."""
    meta: Any = model._meta
    return tuple(meta.columns)


def moved(
    stage: TableStage, archive: type[Model], chosen: Expression, columns: Sequence[str], run_id: int | None
) -> tuple[list[CTE], Expression]:
    """Return the CTEs that delete rows and insert them into the archive, and the condition without which a batch fails.

    It fails if the archive did not take all rows, and if the table has other columns than these: a column that was
    added while the run was in progress would be lost.
    """
    source: Any = stage.model
    delete = source.delete().where(chosen).returning(*(Column(source._meta.table, name) for name in columns))
    deleted = delete.cte("deleted")
    values = [Column(deleted, name) for name in columns]
    added = [SQL("statement_timestamp()"), Value(run_id).cast("bigint")]
    archived = inserted(archive, (*columns, *ADDED), Select((deleted,), [*values, *added])).cte("archived")
    count = SQL("count(*)")
    is_whole = Expression(Select((archived,), [count]), OP.EQ, Select((deleted,), [count]))
    now = SQL(_COLUMNS_NOW, (quoted_name(source),))
    is_same = Expression(now, OP.EQ, fn.STRING_TO_ARRAY("\n".join(columns), "\n"))
    return [deleted, archived], Expression(is_whole, OP.AND, is_same)


def inserted(model: type[Model], columns: Sequence[str], rows: Select) -> Any:
    """Return the statement that inserts rows into a table, also into columns that its model does not declare."""
    meta: Any = model._meta
    return ModelInsert(model, rows, [Column(meta.table, name) for name in columns]).returning(SQL("1"))
