"""Tables as PostgreSQL's catalog describes them, and removal of optional fields whose columns a table lacks."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from peewee import Field, Model, ProgrammingError

from housekeeping.database.connection import database

#: Constraints of a view, a foreign table or an inheritance parent do not hold for all of its rows.
#: PostgreSQL 18 also sets attnotnull for a NOT NULL constraint that is NOT VALID.
_READ_TABLE: Final = """WITH there AS (
    SELECT given.id, pg_class.relkind = 'r' AND NOT EXISTS (
        SELECT FROM pg_inherits WHERE inhparent = given.id
    ) AS plain, pg_class.relkind = 'p' AS partitioned
    FROM (SELECT to_regclass(%s) AS id) AS given LEFT JOIN pg_class ON pg_class.oid = given.id
), columns AS (
    SELECT attnum, attname::text AS name, coalesce(nullif(typbasetype, 0), atttypid)::regtype::text AS type,
        (plain OR partitioned) AND attnotnull AND NOT EXISTS (
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
    WHERE (plain OR partitioned) AND indisunique AND indisvalid AND indpred IS NULL
)
SELECT id IS NOT NULL, coalesce(plain OR partitioned, false), coalesce(plain, false), (
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
    """Table according to the catalog.

    Attributes:
      exists: Whether the table exists.
      enforced: Whether its keys and NOT NULL hold for all of its rows. False for a view, a foreign table and an
        inheritance parent; those have no `keys` and no `not_null` here.
      plain: Whether all rows are in this one table, so that a ctid names a row. False for a partitioned table as well.
      keys: Columns of the primary key, in order, then of each unique index over NOT NULL columns.
      columns: Column -> type.
      not_null: Columns in which no row has NULL.
    """

    exists: bool
    enforced: bool = False
    plain: bool = False
    keys: Sequence[tuple[str, ...]] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    not_null: frozenset[str] = frozenset()

    def is_unique(self, columns: Iterable[str]) -> bool:
        """Return whether no two rows can have the same values in these columns."""
        return any(set(key) <= set(columns) for key in self.keys)


_lock: Final = threading.RLock()
#: Model -> its table, and the version of the table that was read.
_tables: Final[dict[type[Model], tuple[tuple[Any, ...], Table]]] = {}
#: Model -> the table whose columns it was last compared with.
_compared: Final[dict[type[Model], Table]] = {}
#: Model -> fields that were removed because its table lacks their columns.
_removed: Final[dict[type[Model], dict[str, Field]]] = {}


def quoted_name(model: type[Model]) -> str:
    """Return the table's name, quoted for SQL."""
    meta: Any = model._meta
    return ".".join('"' + part.replace('"', '""') + '"' for part in (meta.schema, meta.table_name) if part)


def table_version(model: type[Model]) -> tuple[Any, ...]:
    """Return the cache key for facts about a table: its database, its name, and a counter.

    The counter increases when a statement names a column that does not exist, because the table may have changed.
    """
    meta: Any = model._meta
    return (database.obj, meta.schema, meta.table_name, getattr(database.obj, "unknown_columns", 0))


def table_of(model: type[Model]) -> Table:
    """Return the model's table; the catalog is read once for each `table_version`.

    Raises:
      peewee.PeeweeException: If the catalog cannot be read.
    """
    version, cached = table_version(model), _tables.get(model)
    if cached is not None and cached[0] == version:
        return cached[1]
    table = read_table(model)
    if table.exists:
        _tables[model] = (version, table)
    return table


def table_if_visible(model: type[Model]) -> Table:
    """Return the model's table; one that does not exist if no database is set or the schema is not accessible."""
    if database.obj is None:
        return Table(exists=False)
    try:
        return table_of(model)
    except ProgrammingError:  # the first statement on the table reports it
        return Table(exists=False)


def read_table(model: type[Model]) -> Table:
    """Read the model's table from the catalog, without the cache.

    Raises:
      peewee.PeeweeException: If the catalog cannot be read.
    """
    row: Any = database.execute_sql(_READ_TABLE, (quoted_name(model),)).fetchone()
    exists, enforced, plain, keys, columns, not_null = row
    return Table(exists, enforced, plain, [tuple(key) for key in keys or ()], columns or {}, frozenset(not_null or ()))


def partitioned_table_of(model: type[Model]) -> str | None:
    """Return the partitioned table that the model's table is a partition of, if any."""
    row: Any = database.execute_sql(_PARTITION_OF, (quoted_name(model),)).fetchone()
    return None if row is None else str(row[0])


def optional_fields(model: type[Model]) -> tuple[str, ...]:
    """Return the names of the fields whose columns may be missing: ``class Meta: optional_fields``."""
    names: tuple[str, ...] = getattr(model._meta, "optional_fields", ())
    return names


def remove_absent_fields(model: type[Model]) -> None:
    """Remove the optional fields whose columns the table lacks from the model, and restore the others.

    Without a database or a table the model stays unchanged.

    Raises:
      peewee.PeeweeException: If the catalog cannot be read.
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
    """Return whether the column is an optional field that is removed from its model."""
    return isinstance(column, Field) and column.name in _removed.get(column.model, {})


def forget_table(model: type[Model]) -> None:
    """Restore all declared fields of the model and forget its table."""
    with _lock:
        _tables.pop(model, None)
        _compared.pop(model, None)
        _use(model, [])


def _field(model: type[Model], name: str) -> Field:
    field: Field = _removed.get(model, {}).get(name) or model._meta.fields[name]
    return field


def _use(model: type[Model], absent: list[str]) -> None:
    meta: Any = model._meta
    removed = _removed.setdefault(model, {})
    for name in absent:
        if name not in removed:
            removed[name] = meta.fields[name]
            meta.remove_field(name)
    for name in [name for name in removed if name not in absent]:
        meta.add_field(name, removed.pop(name))
