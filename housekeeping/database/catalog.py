"""The columns of a model's table by the catalog, and the model without the optional columns that the table lacks."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from peewee import Field, Model, ProgrammingError

from housekeeping.database.connection import database

#: The constraints of a view, a foreign table or a parent of inheriting tables do not hold for all of its rows.
#: PostgreSQL 18 sets attnotnull for a constraint that is NOT VALID, too.
_TABLE: Final = """WITH there AS (
    SELECT given.id, pg_class.relkind IN ('r', 'p') AND NOT (
        pg_class.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits WHERE inhparent = given.id)
    ) AS enforced
    FROM (SELECT to_regclass(%s) AS id) AS given LEFT JOIN pg_class ON pg_class.oid = given.id
), columns AS (
    SELECT attnum, attname::text AS name, coalesce(nullif(typbasetype, 0), atttypid)::regtype::text AS type,
        there.enforced AND attnotnull AND NOT EXISTS (
            SELECT FROM pg_constraint
            WHERE conrelid = there.id AND contype = 'n' AND NOT convalidated AND conkey = ARRAY[attnum]
        ) AS not_null
    FROM there JOIN pg_attribute ON attrelid = there.id JOIN pg_type ON pg_type.oid = atttypid
    WHERE attnum > 0 AND NOT attisdropped
), keys AS (
    SELECT indisprimary, indexrelid, indnkeyatts, (
        SELECT jsonb_agg(name ORDER BY place)
        FROM unnest(indkey::smallint[]) WITH ORDINALITY AS one (number, place)
        JOIN columns ON attnum = number AND not_null AND place <= indnkeyatts
    ) AS names
    FROM there JOIN pg_index ON indrelid = there.id
    WHERE enforced AND indisunique AND indisvalid AND indpred IS NULL
)
SELECT id IS NOT NULL, coalesce(enforced, false), (
    SELECT jsonb_agg(names ORDER BY indisprimary DESC, indnkeyatts, indexrelid)
    FROM keys WHERE jsonb_array_length(names) = indnkeyatts
), (SELECT jsonb_object_agg(name, type) FROM columns), (SELECT jsonb_agg(name) FROM columns WHERE not_null)
FROM there
"""
_PARTITION_OF: Final = """SELECT pg_partition_root(oid)::regclass::text
FROM pg_class WHERE oid = to_regclass(%s) AND relispartition
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A table as the catalog has it.

    Attributes:
      exists: Whether there is such a table.
      enforced: Whether its keys and NOT NULL hold for all its rows. Not so for a view, a foreign table and a parent of
        inheriting tables; those have no `keys` and no `not_null` here.
      keys: Columns of the primary key, in order, then those of each unique index over columns that are NOT NULL.
      columns: Column -> type.
      not_null: The columns in which no row has NULL.
    """

    exists: bool
    enforced: bool = False
    keys: Sequence[tuple[str, ...]] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    not_null: frozenset[str] = frozenset()

    def is_unique(self, columns: Iterable[str]) -> bool:
        """Return whether no two rows can have the same values in these columns."""
        return any(set(key) <= set(columns) for key in self.keys)


_lock: Final = threading.RLock()
#: Model -> its table, and the place where it was looked up.
_tables: Final[dict[type[Model], tuple[tuple[Any, ...], Table]]] = {}
#: Model -> the table whose columns it was last compared with.
_compared: Final[dict[type[Model], Table]] = {}
#: Fields that were taken from a model because its table has no such column.
_left_out: Final[dict[type[Model], dict[str, Field]]] = {}


def quoted_name(model: type[Model]) -> str:
    """Return the table's name as SQL has it."""
    meta: Any = model._meta
    return ".".join('"' + part.replace('"', '""') + '"' for part in (meta.schema, meta.table_name) if part)


def table_version(model: type[Model]) -> tuple[Any, ...]:
    """Return what a table's shape is remembered by: its database and name.

    A statement that named a column which is not there makes it another place: the table may have changed.
    """
    meta: Any = model._meta
    return (database.obj, meta.schema, meta.table_name, getattr(database.obj, "unknown_columns", 0))


def table_of(model: type[Model]) -> Table:
    """Return the model's table; the catalog is asked once for each place.

    Raises:
      peewee.PeeweeException: When the database cannot be asked.
    """
    place, known = table_version(model), _tables.get(model)
    if known is not None and known[0] == place:
        return known[1]
    table = read_table(model)
    if table.exists:
        _tables[model] = (place, table)
    return table


def table_if_visible(model: type[Model]) -> Table:
    """Return the model's table; one that does not exist where no database is set or the schema may not be used."""
    if database.obj is None:
        return Table(exists=False)
    try:
        return table_of(model)
    except ProgrammingError:  # said by whatever uses the table
        return Table(exists=False)


def read_table(model: type[Model]) -> Table:
    """Return the model's table as it is now, and remember nothing.

    Raises:
      peewee.PeeweeException: When the database cannot be asked.
    """
    row: Any = database.execute_sql(_TABLE, (quoted_name(model),)).fetchone()
    exists, enforced, keys, columns, not_null = row
    return Table(exists, enforced, [tuple(key) for key in keys or ()], columns or {}, frozenset(not_null or ()))


def partitioned_table_of(model: type[Model]) -> str | None:
    """Return the partitioned table that the model's table is a partition of; None if it is none."""
    row: Any = database.execute_sql(_PARTITION_OF, (quoted_name(model),)).fetchone()
    return None if row is None else str(row[0])


def optional_fields(model: type[Model]) -> tuple[str, ...]:
    """Return the names of the fields whose columns a table need not have: ``class Meta: optional_fields``."""
    names: tuple[str, ...] = getattr(model._meta, "optional_fields", ())
    return names


def remove_absent_fields(model: type[Model]) -> None:
    """Take those optional fields from the model whose columns its table does not have; give others back.

    A table that is not there, or no database, leaves the model as it is.

    Raises:
      peewee.PeeweeException: When the database cannot be asked.
    """
    if not optional_fields(model) or database.obj is None:
        return
    table = table_of(model)
    if not table.exists or _compared.get(model) is table:
        return
    with _lock:
        _use(model, [name for name in optional_fields(model) if _field(model, name).column_name not in table.columns])
        _compared[model] = table


def is_absent(column: object) -> bool:
    """Return whether the column is an optional field that its model does without for now."""
    return isinstance(column, Field) and column.name in _left_out.get(column.model, {})


def forget_table(model: type[Model]) -> None:
    """Take the model back to all fields that it was declared with; its table is asked anew."""
    with _lock:
        _tables.pop(model, None)
        _compared.pop(model, None)
        _use(model, [])


def _field(model: type[Model], name: str) -> Field:
    field: Field = _left_out.get(model, {}).get(name) or model._meta.fields[name]
    return field


def _use(model: type[Model], absent: list[str]) -> None:
    meta: Any = model._meta
    left_out = _left_out.setdefault(model, {})
    for name in absent:
        if name not in left_out:
            left_out[name] = meta.fields[name]
            meta.remove_field(name)
    for name in [name for name in left_out if name not in absent]:
        meta.add_field(name, left_out.pop(name))
