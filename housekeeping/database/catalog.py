"""Tables as PostgreSQL's catalog describes them, the columns that identify a row, and fields without a column.

A row is identified by the model's declared key, or by the table's own key if the declared one is not unique. Optional
fields whose columns a table lacks are removed from the model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from peewee import BareField, BigIntegerField, CompositeKey, Field, Model, ProgrammingError

from housekeeping.core.threads import free_after_fork
from housekeeping.database.connection import BaseModel, database

if TYPE_CHECKING:
    from peewee import ModelSelect


#: Constraints of a view, a foreign table or an inheritance parent do not hold for all of its rows.
#: PostgreSQL 18 also sets attnotnull for a NOT NULL constraint that is NOT VALID.
#: It begins with SELECT, so that the connection needs no check by another statement.
_READ_TABLE: Final = """SELECT * FROM (WITH there AS (
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
), (SELECT jsonb_object_agg(name, type) FROM columns), (SELECT jsonb_agg(name) FROM columns WHERE not_null),
    to_regclass('pg_dist_partition') IS NOT NULL
FROM there) AS read (does_exist, enforced, plain, keys, columns, not_null, on_citus)
"""
#: Citus has this catalog. Of its tables without a distribution column, a reference table is on every node.
_DISTRIBUTION: Final = """SELECT CASE WHEN partmethod <> 'n' THEN 'distributed' WHEN repmodel = 't' THEN 'reference'
    ELSE 'single' END
FROM pg_dist_partition WHERE logicalrelid = to_regclass(%s)
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
      distribution: Where Citus has its rows: ``distributed`` by a column to shards, as a ``reference`` table on every
        node, in a ``single`` shard, or ``local``, on the coordinator alone. None on a server without Citus.
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
    distribution: Literal["distributed", "reference", "single", "local"] | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether its rows are in shards, where a batch of several shards cannot lock them."""
        return self.distribution == "distributed"

    def is_unique(self, columns: Iterable[str]) -> bool:
        """Return whether no two rows can have the same values in these columns."""
        return any(set(key) <= set(columns) for key in self.keys)


_lock: Final = free_after_fork(threading.RLock())
#: Numbers of changes to this module's data: a table was read, missing or forgotten, or the fields of a model changed.
_changes: Final = count(1)
_last_change = 0
#: Model -> its table, and the version of the table that was read.
_tables: Final[dict[type[Model], tuple[tuple[Any, ...], Table]]] = {}
#: Model -> fields that were removed because its table lacks their columns.
_removed: Final[dict[type[Model], dict[str, Field]]] = {}


def quoted_name(model: type[Model]) -> str:
    """Return the table's name, quoted for SQL."""
    meta: Any = model._meta
    return ".".join(quoted(part) for part in (meta.schema, meta.table_name) if part)


def quoted(name: str) -> str:
    """Return a name, quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def listed_for_sql(names: Iterable[str]) -> str:
    """Return names as a comma-separated list for a printed statement. Names are quoted only if SQL requires it."""
    query = "SELECT quote_ident(name) FROM unnest(%s::text[]) WITH ORDINALITY AS names (name, place) ORDER BY place"
    return ", ".join(name for (name,) in database.execute_sql(query, ([*names],)))


def escaped(text: str) -> str:
    """Return SQL with escaped percent signs, which the driver otherwise takes for the places of parameters."""
    return text.replace("%", "%%")


def sql_name(name: str) -> str:
    """Return a name quoted for SQL with parameters."""
    return escaped(quoted(name))


def of_any_length(kind: str) -> str:
    """Return the type without a limit for a type whose name alone means the length 1; any other type as it is."""
    return {"character": "bpchar", "bit": "bit varying"}.get(kind, kind)


def table_version(model: type[Model]) -> tuple[Any, ...]:
    """Return the cache key for facts about a table: its database, its name, and a counter.

    The counter increases when a statement names a column that does not exist, because the table may have changed.
    """
    meta: Any = model._meta
    return (database.obj, meta.schema, meta.table_name, getattr(database.obj, "catalog_errors", 0))


def catalog_version() -> tuple[Any, ...]:
    """Return a value that changes with the known tables and the fields of their models.

    Statements that were built with the same version and the same declaration are equal.
    """
    return (database.obj, getattr(database.obj, "catalog_errors", 0), _last_change)


def _note_change() -> None:
    global _last_change
    _last_change = next(_changes)


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
    _note_change()
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
    exists, enforced, plain, keys, columns, not_null, on_citus = row
    found: Any = database.execute_sql(_DISTRIBUTION, (quoted_name(model),)).fetchone() if on_citus else None
    return Table(
        exists,
        enforced,
        plain and not found,
        [tuple(key) for key in keys or ()],
        columns or {},
        frozenset(not_null or ()),
        found[0] if found else "local" if on_citus else None,
    )


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
    if table.exists:
        with _lock:
            absent = [name for name in optional_fields(model) if _field(model, name).column_name not in table.columns]
            if set(absent) != set(_removed.get(model, ())):
                _use(model, absent)
                _note_change()


def is_absent(column: object) -> bool:
    """Return whether the column is an optional field that is removed from its model."""
    return isinstance(column, Field) and column.name in _removed.get(column.model, {})


def forget_table(model: type[Model]) -> None:
    """Restore all declared fields of the model and forget its table, so that the next `identify` reads it again."""
    with _lock:
        _tables.pop(model, None)
        _identified.pop(model, None)
        _use(model, [])
        _note_change()


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


_READ_COLUMNS: Final = """SELECT attname::text, format_type(atttypid, atttypmod), attnotnull, attgenerated <> '',
    CASE WHEN attgenerated = '' THEN pg_get_expr(adbin, adrelid) END
FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""


@dataclass(frozen=True, slots=True)
class ColumnType:
    """Column of a table, according to the catalog.

    Attributes:
      sql_type: With its modifier, such as ``numeric(10,2)``.
      generated: Whether PostgreSQL computes it from other columns.
      default: The expression of its default; None if it has none.
    """

    name: str
    sql_type: str
    not_null: bool = False
    generated: bool = False
    default: str | None = None


def read_columns(model: type[Model]) -> tuple[ColumnType, ...]:
    """Read the columns of the model's table, in their order, without a cache; empty without a table.

    Raises:
      peewee.PeeweeException: If the catalog cannot be read.
    """
    return tuple(ColumnType(*row) for row in database.execute_sql(_READ_COLUMNS, (quoted_name(model),)))


def column_names(model: type[Model]) -> tuple[str, ...]:
    """Read the names of the columns of the model's table as `read_columns` does, but without waiting for its lock.

    The expressions of defaults cannot be read while another session locks the table.
    """
    query = "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0"
    rows = database.execute_sql(f"{query} AND NOT attisdropped ORDER BY attnum", (quoted_name(model),))
    return tuple(name for (name,) in rows)


def defers_keys(model: type[Model]) -> bool:
    """Return whether a unique or exclusion constraint of the model's table is DEFERRABLE."""
    query = "SELECT EXISTS (SELECT FROM pg_index WHERE indrelid = to_regclass(%s) AND NOT indimmediate)"
    return bool(database.execute_sql(query, (quoted_name(model),)).fetchone()[0])


_COMPOSITE_KEY_NAME: Final = "__composite_key__"
_INTEGERS: Final = ("smallint", "integer", "bigint")

#: Model -> the version of its table when it was last identified.
_identified: Final[dict[type[Model], tuple[Any, ...]]] = {}
#: Model -> its declared primary key: a field, a `CompositeKey`, or False for none.
_declared: Final[dict[type[Model], Any]] = {}
#: Model -> fields that were added for key columns of the table.
_added: Final[dict[type[Model], list[Field]]] = {}


class PartitionedModel(BaseModel):
    """Base class of a model whose table may be partitioned.

    The columns of its primary key that are not declared, such as ``partition_id``, are fields as well. They are read
    from the database when a whole record is first read.
    """

    @classmethod
    def select(cls, *fields: Any) -> ModelSelect[Any]:
        if not fields:
            identify(cls)
        query: ModelSelect[Any] = super().select(*fields)
        return query

    @classmethod
    def get_by_id(cls, pk: Any) -> Self:
        identify(cls)
        record: Self = super().get_by_id(pk)
        return record


def identify(model: type[Model]) -> None:
    """Give the model the key of its table if the declared key is not unique; reads the catalog once for each table.

    A key column that was not declared, such as ``partition_id``, becomes a field of the model. Optional fields whose
    columns are absent are removed. Without a table or a unique key the model stays as declared.

    Raises:
      peewee.PeeweeException: If the catalog cannot be read.
    """
    if database.obj is None:
        return
    version = table_version(model)
    if _identified.get(model) == version:
        return
    with _lock:
        table = table_of(model)
        declared = declared_key_columns(model)
        _use_key(
            model,
            declared if vouches_for_key(model) or table.is_unique(declared) or not table.keys else table.keys[0],
            table,
        )
        remove_absent_fields(model)
        if table.exists:
            _identified[model] = version
        _note_change()


def key_of(model: type[Model]) -> tuple[Any, ...]:
    """Return the fields that identify a row: the key of the model, possibly replaced by that of the catalog."""
    meta: Any = model._meta
    return tuple(meta.get_primary_keys())


def vouches_for_key(model: type[Model]) -> bool:
    """Return whether the model declares its key to be unique, without proof: ``class Meta: key_is_unique``."""
    return bool(getattr(model._meta, "key_is_unique", False))


def declared_key_columns(model: type[Model]) -> tuple[str, ...]:
    """Return the names of the declared key columns."""
    meta: Any = model._meta
    declared = _declared.get(model, meta.primary_key)
    if declared is False:
        return ()
    if isinstance(declared, CompositeKey):
        return tuple(meta.fields[name].column_name for name in declared.field_names)
    return (declared.column_name,)


def _use_key(model: type[Model], columns: tuple[str, ...], table: Table) -> None:
    meta: Any = model._meta
    declared = _declared.setdefault(model, meta.primary_key)
    if set(columns) == set(declared_key_columns(model)):
        _set_key(meta, declared)
    else:
        for column in columns:
            if column not in meta.columns:
                integer = table.columns.get(column) in _INTEGERS
                meta.add_field(column, BigIntegerField() if integer else BareField())
                _added.setdefault(model, []).append(meta.columns[column])
        if len(columns) == 1:
            _set_key(meta, meta.columns[columns[0]])
        else:
            meta.set_primary_key(_COMPOSITE_KEY_NAME, CompositeKey(*(meta.columns[column].name for column in columns)))
    for added in [each for each in _added.get(model, ()) if each.column_name not in columns]:
        _added[model].remove(added)
        meta.remove_field(added.name)
        delattr(model, added.name)


def _set_key(meta: Any, key: Any) -> None:
    meta.primary_key, meta.composite_key = key, isinstance(key, CompositeKey)
    meta.auto_increment = isinstance(key, Field) and key.auto_increment


#: `top` is a table with all of its partitions. The table that is asked about may be a partition by itself. A constraint
#: of a partitioned table has one for each partition below it; only the topmost is listed.
_KEYS: Final = """
WITH RECURSIVE reached (id, top) AS (
    SELECT id, id FROM (SELECT to_regclass(%(table)s)::oid AS id) AS asked WHERE id IS NOT NULL
    UNION
    SELECT next.id, next.top FROM reached CROSS JOIN LATERAL (
        SELECT inhrelid AS id, reached.top FROM pg_inherits WHERE inhparent = reached.id
        UNION ALL
        SELECT conrelid, coalesce(pg_partition_root(conrelid)::oid, conrelid)
        FROM pg_constraint WHERE contype = 'f' AND confrelid = reached.id AND %(deep)s
    ) AS next
)
SELECT conname::text, conrelid::regclass::text,
    coalesce(pg_partition_root(conrelid)::oid, conrelid)::bigint,
    ARRAY(SELECT attname::text FROM unnest(conkey[:width]) WITH ORDINALITY AS one (number, place)
          JOIN pg_attribute ON attrelid = conrelid AND attnum = number ORDER BY place),
    top::bigint,
    ARRAY(SELECT attname::text FROM unnest(confkey[:width]) WITH ORDINALITY AS one (number, place)
          JOIN pg_attribute ON attrelid = confrelid AND attnum = number ORDER BY place),
    CASE WHEN enforced THEN CASE confdeltype WHEN 'a' THEN 'NO ACTION' WHEN 'r' THEN 'RESTRICT' WHEN 'c' THEN 'CASCADE'
        WHEN 'n' THEN 'SET NULL' ELSE 'SET DEFAULT' END END,
    width < cardinality(conkey),
    ARRAY(SELECT attname::text FROM jsonb_array_elements_text(
              CASE jsonb_typeof(listed) WHEN 'array' THEN listed ELSE to_jsonb(conkey) END
          ) AS number JOIN pg_attribute ON attrelid = conrelid AND attnum = number::int ORDER BY attnum),
    conparentid = 0,
    EXISTS (
        SELECT FROM pg_index WHERE indrelid = conrelid AND indisvalid AND indpred IS NULL
        AND (indkey::smallint[])[0:width - 1] @> conkey[:width]
    )
FROM pg_constraint AS one JOIN reached ON reached.id = confrelid
CROSS JOIN LATERAL (
    -- New in PostgreSQL 15, and the others in 18.
    SELECT content -> 'confdelsetcols' AS listed, content -> 'conenforced' IS DISTINCT FROM 'false' AS enforced,
        cardinality(conkey) - CASE content -> 'conperiod' WHEN 'true' THEN 1 ELSE 0 END AS width
    FROM to_jsonb(one) AS content
) AS newer
WHERE contype = 'f' AND NOT EXISTS (
    SELECT FROM pg_constraint AS above JOIN reached AS upper ON upper.id = above.confrelid
    WHERE above.oid = one.conparentid AND upper.top = reached.top
) ORDER BY 3, 5
"""
_TABLES: Final = """
SELECT nspname::text, relname::text, pg_table_is_visible(pg_class.oid),
    coalesce(pg_partition_root(pg_class.oid)::oid, pg_class.oid)::bigint
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE relname = ANY (%s) AND relkind IN ('r', 'p')
"""


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A foreign key.

    Attributes:
      name: Name of the constraint.
      table: The referencing table, as SQL has it.
      table_id: Its oid; of a partition, that of the partitioned table.
      columns: The referencing columns, by name, without that of a PERIOD.
      referenced_id: Oid of the referenced table; likewise, unless it is the given partition.
      referenced_columns: The referenced columns, likewise.
      on_delete: What PostgreSQL does with the referencing rows, such as ``NO ACTION``; None if it is NOT ENFORCED.
      temporal: Whether it has a PERIOD, so that rows with the same columns may refer to other rows.
      set_columns: The columns that SET NULL and SET DEFAULT change.
      is_own: Whether the constraint was declared for these tables; otherwise for partitioned tables above them.
      indexed: Whether an index begins with the referencing columns.
    """

    name: str
    table: str
    table_id: int
    columns: Sequence[str]
    referenced_id: int
    referenced_columns: Sequence[str]
    on_delete: str | None
    temporal: bool
    set_columns: Sequence[str]
    is_own: bool
    indexed: bool


def foreign_keys_to(table: str, *, deep: bool = False) -> list[ForeignKey]:
    """Return the foreign keys that refer to a table, by its name in SQL.

    Parameters:
      deep: Also return those that refer to the referencing tables, and so on.

    Raises:
      peewee.PeeweeException: The catalog cannot be read.
    """
    rows = database.execute_sql(_KEYS, {"table": table, "deep": deep}).fetchall()
    return [ForeignKey(*row) for row in rows]


def table_ids(models: Sequence[type[Model]]) -> list[int | None]:
    """Return the oid of each model's table; of a partition, that of the partitioned table. None if there is none.

    Raises:
      peewee.PeeweeException: The catalog cannot be read.
    """
    names = [(model._meta.schema, model._meta.table_name) for model in models]
    found: dict[tuple[str | None, str], int] = {}
    for schema, table, is_visible, number in database.execute_sql(_TABLES, ([name for _, name in names],)):
        found[schema, table] = number
        if is_visible:
            found[None, table] = number
    return [found.get(name) for name in names]


#: Bytes of a row in a table whose density is unknown, because it was never vacuumed.
_ROW_BYTES: Final = 100
_TABLE_FACTS: Final = """
WITH RECURSIVE parts (top, id) AS (
    SELECT id, id FROM unnest(%s::oid[]) AS id
    UNION SELECT top, inhrelid FROM parts JOIN pg_inherits ON inhparent = parts.id
), sizes AS (
    SELECT top, sum(pg_relation_size(oid) * CASE
        WHEN relpages > 0 AND reltuples >= 0 THEN reltuples / relpages / current_setting('block_size')::int
        ELSE 1.0 / %s
    END) AS rows
    FROM parts JOIN pg_class ON oid = parts.id WHERE relkind = 'r' GROUP BY top
)
SELECT pg_class.oid::bigint, pg_class.oid::regclass::text, nspname::text, relname::text,
    pg_table_is_visible(pg_class.oid), relkind = 'p',
    coalesce(rows, 0)::bigint, quote_ident(current_user), row_security_active(pg_class.oid), CASE
        WHEN NOT has_schema_privilege(relnamespace, 'USAGE') THEN quote_ident(nspname)
    END, ARRAY(
        SELECT kind FROM unnest(ARRAY['SELECT', 'DELETE', 'UPDATE']) AS kind
        WHERE has_table_privilege(pg_class.oid, kind)
    ), (
        SELECT jsonb_object_agg(attname, jsonb_build_array(
            quote_ident(attname), format_type(atttypid, atttypmod), attnotnull,
            coalesce(pg_get_expr(adbin, adrelid), pg_get_expr(typdefaultbin, 0)),
            has_column_privilege(attrelid, attnum, 'UPDATE')
        )) FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid
        LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
        WHERE attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped
    ), to_regclass('pg_dist_partition') IS NOT NULL
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace LEFT JOIN sizes ON top = pg_class.oid
WHERE pg_class.oid = ANY (%s::oid[])
"""


#: The role if policies hide rows of a table from it. They do not if a permissive policy lets it do everything with all
#: rows, and no restrictive one hides any.
_HIDDEN_FROM: Final = """WITH policies AS (
    SELECT polpermissive, polcmd, pg_get_expr(polqual, polrelid) AS rows FROM pg_policy
    WHERE polrelid = %(table)s AND EXISTS (
        SELECT FROM unnest(polroles) AS role WHERE role = 0 OR pg_has_role(current_user, role, 'USAGE')
    )
)
SELECT quote_ident(current_user) WHERE row_security_active(%(table)s::oid) AND (
    NOT EXISTS (SELECT FROM policies WHERE polpermissive AND polcmd = '*' AND rows = 'true')
    OR EXISTS (SELECT FROM policies WHERE NOT polpermissive)
)
"""


def current_role() -> str:
    """Return the role of the connection, quoted if necessary, for a GRANT that an administrator executes."""
    return str(database.execute_sql("SELECT quote_ident(current_user)").fetchone()[0])


def role_without_rows(table_id: int) -> str | None:
    """Return the current role, quoted if necessary, if policies hide rows of the table from it; else None."""
    row: Any = database.execute_sql(_HIDDEN_FROM, {"table": table_id}).fetchone()
    return None if row is None else str(row[0])


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """A column of a table, and what the current role may do with it.

    Attributes:
      sql_name: Its name, quoted if necessary.
      default: SQL of its default, also of its domain's; None without one.
    """

    sql_name: str
    sql_type: str
    not_null: bool
    default: str | None
    may_update: bool


@dataclass(frozen=True, slots=True)
class TableFacts:
    """A table, its estimated size, and what the current role may do with it.

    Attributes:
      name: Its name as SQL has it here: quoted if necessary, with its schema unless the search path finds it.
      schema, plain_name: Its schema and its name, unquoted.
      rows: Estimated number of rows, by the size of its files; with partitions and inheriting tables.
      role: The current role, quoted if necessary.
      has_policies: Whether row-level security applies to the role.
      closed_schema: Its schema, quoted if necessary, if the role may not use it; else None.
      rights: Those of SELECT, DELETE and UPDATE that the role has on the whole table.
      columns: Name -> column.
      is_distributed: Whether its rows are in shards of Citus.
    """

    id: int
    name: str
    schema: str
    plain_name: str
    is_visible: bool
    is_partitioned: bool
    rows: int
    role: str
    has_policies: bool
    closed_schema: str | None
    rights: Sequence[str]
    columns: Mapping[str, ColumnFacts]
    is_distributed: bool

    @property
    def spellings(self) -> tuple[str, ...]:
        """The names by which a declaration can refer to this table."""
        plain = (self.plain_name,) if self.is_visible else ()
        return (self.name, f"{self.schema}.{self.plain_name}", *plain)


def read_table_facts(ids: Iterable[int]) -> list[TableFacts]:
    """Read the tables with these oids, without a cache. Dropped tables are left out.

    Raises:
      peewee.PeeweeException: The catalog cannot be read.
    """
    wanted = list(ids)
    found = []
    for *row, columns, on_citus in database.execute_sql(_TABLE_FACTS, (wanted, _ROW_BYTES, wanted)).fetchall():
        distribution = database.execute_sql(_DISTRIBUTION, (row[1],)).fetchone() if on_citus else None
        row += {name: ColumnFacts(*each) for name, each in (columns or {}).items()}, distribution == ("distributed",)
        found.append(TableFacts(*row))
    return found


ZONED: Final = {"timestamp with time zone"}
UNZONED: Final = {"timestamp without time zone"}
TEXTS: Final = {"text", "character varying", "character", "citext"}
_INTEGER_TYPES: Final = {"smallint", "integer", "bigint", "numeric"}
#: peewee's name of a field's type -> fitting column types.
FITTING: Final[Mapping[str, set[str]]] = {
    **dict.fromkeys(("AUTO", "BIGAUTO", "INT", "BIGINT", "SMALLINT"), _INTEGER_TYPES),
    **dict.fromkeys(("TEXT", "VARCHAR", "CHAR"), TEXTS),
    "BOOL": {"boolean"},
    "DATETIME": ZONED | UNZONED | {"date"},
    "TIMESTAMPTZ": ZONED,
    "TIMESTAMP": UNZONED,
}
