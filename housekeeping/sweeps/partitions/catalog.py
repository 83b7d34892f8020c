"""Range partitions of a table, as PostgreSQL's catalog has them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from peewee import Model

from housekeeping.core.errors import DeclarationError
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database

#: Types of the partition key that are a time, and SQL for a bound of that type.
_TIMES: Final = {
    "timestamp with time zone": "{}::timestamptz",
    "timestamp without time zone": "{}::timestamp AT TIME ZONE 'UTC'",
    "date": "{}::date::timestamp AT TIME ZONE 'UTC'",
}
_LOWER: Final = r"substring(bounds FROM '^FOR VALUES FROM \(''([^'']*)''')"
_UPPER: Final = r"substring(bounds FROM ' TO \(''([^'']*)''')"
#: DETACH ... CONCURRENTLY is new in PostgreSQL 14.
_CONCURRENTLY_SINCE: Final = 140_000

_TABLE: Final = """
SELECT format('%%I.%%I', nspname, relname), partstrat::text, attname::text, format_type(atttypid, NULL), partnatts,
    partdefid <> 0, current_setting('server_version_num')::int
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
LEFT JOIN pg_partitioned_table ON partrelid = pg_class.oid
LEFT JOIN pg_attribute ON attrelid = pg_class.oid AND attnum = partattrs[0]
WHERE pg_class.oid = to_regclass(%s)
"""
#: A partition may be partitioned itself. PostgreSQL 13 has no column inhdetachpending.
_PARTITIONS: Final = """
WITH partitions AS (
    SELECT pg_class.oid AS id, format('%%I.%%I', nspname, relname) AS name, pg_get_expr(relpartbound, pg_class.oid)
        AS bounds, coalesce((to_jsonb(pg_inherits) ->> 'inhdetachpending')::boolean, false) AS pending,
        relkind = 'f' AS is_foreign, obj_description(pg_class.oid, 'pg_class') AS comment
    FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE inhparent = to_regclass(%(table)s)
)
SELECT id::bigint, name, bounds, pending, is_foreign, comment, LOWER, UPPER, ROWS, BYTES
FROM partitions AS one ORDER BY 8, 2
"""
_ROWS: Final = """(
    SELECT CASE WHEN bool_and(reltuples > 0 OR pg_relation_size(oid) = 0) THEN sum(greatest(reltuples, 0))::bigint END
    FROM pg_class WHERE relkind = 'r' AND oid IN (
        SELECT one.id UNION SELECT relid FROM pg_partition_tree(one.id)
    )
)"""
_BYTES: Final = """(
    SELECT coalesce(sum(pg_total_relation_size(each)), 0)::bigint
    FROM (SELECT one.id AS each UNION SELECT relid FROM pg_partition_tree(one.id)) AS parts
)"""


@dataclass(frozen=True, slots=True)
class Partition:
    """Partition, or a table that was one.

    Attributes:
      id: Its oid.
      name: Schema and name, quoted for SQL.
      bounds: Its bounds as SQL, such as ``FOR VALUES FROM (...) TO (...)``.
      pending: Whether an interrupted DETACH CONCURRENTLY has to be finished.
      is_foreign: Whether it is a foreign table.
      comment: The comment of the table.
      lower, upper: Its range; `upper` is not part of it. None if open, or for the DEFAULT partition.
      rows: PostgreSQL's estimate; None if never analyzed.
      bytes: Size with indexes and TOAST.
    """

    id: int
    name: str
    bounds: str
    pending: bool
    is_foreign: bool
    comment: str | None
    lower: datetime | None
    upper: datetime | None
    rows: int | None
    bytes: int


@dataclass(frozen=True, slots=True)
class PartitionedTable:
    """Table that is partitioned by ranges of time.

    Attributes:
      name: Schema and name, quoted for SQL.
      column: The first column of the partition key.
      kind: Its type.
      several_columns: Whether the key has further columns, so that rows may be exactly at the upper bound.
      has_default: Whether there is a DEFAULT partition.
      detaches_concurrently: Whether PostgreSQL can detach its partitions without an exclusive lock on the table.
    """

    name: str
    column: str
    kind: str
    several_columns: bool
    has_default: bool
    detaches_concurrently: bool
    partitions: tuple[Partition, ...]

    def is_older(self, upper: datetime | None, limit: datetime) -> bool:
        """Return whether every row of a partition with this end is before the limit."""
        if upper is None:
            return False
        return upper < limit if self.several_columns else upper <= limit

    def older_than(self, limit: datetime) -> list[Partition]:
        """Return the partitions whose whole range is before the limit, oldest first."""
        return [each for each in self.partitions if self.is_older(each.upper, limit)]

    def range_of(self, bounds: str) -> tuple[datetime | None, datetime | None]:
        """Return beginning and end of the bounds that a partition of this table had."""
        both = f"{_bound(_LOWER, self.kind)}, {_bound(_UPPER, self.kind)}"
        sql = f"SELECT {both} FROM (SELECT %s AS bounds) AS given"  # noqa: S608 - the two constants
        row: Any = database.execute_sql(sql, (bounds,)).fetchone()
        return row[0], row[1]


def read_partitions(model: type[Model]) -> PartitionedTable:
    """Return the partitions of the model's table.

    Raises:
      DeclarationError: The table is not partitioned by ranges of time.
      peewee.PeeweeException: The catalog cannot be read.
    """
    table = quoted_name(model)
    found: Any = database.execute_sql(_TABLE, (table,)).fetchone()
    if found is None:
        raise DeclarationError(f"there is no table {table}")
    name, strategy, column, kind, columns, has_default, version = found
    if strategy != "r":
        how = {"l": "by list", "h": "by hash"}.get(strategy)
        text = "is not partitioned" if how is None else f"is partitioned {how}"
        raise DeclarationError(f"{table} {text}; DropPartitions needs PARTITION BY RANGE of a time")
    if kind not in _TIMES:
        by = "an expression" if column is None else f"{column} ({kind})"
        raise DeclarationError(f"{table} is partitioned by {by}; DropPartitions needs a column with a date or a time")
    sql = _PARTITIONS.replace("LOWER", _bound(_LOWER, kind)).replace("UPPER", _bound(_UPPER, kind))
    rows = database.execute_sql(sql.replace("ROWS", _ROWS).replace("BYTES", _BYTES), {"table": table}).fetchall()
    # Through a pooler, the settings of a transaction are sent together with its first statement.
    direct = database.prepared() is not None
    concurrently = version >= _CONCURRENTLY_SINCE and not has_default and direct
    partitions = tuple(Partition(*row) for row in rows)
    return PartitionedTable(name, column, kind, columns > 1, has_default, concurrently, partitions)


def _bound(text: str, kind: str) -> str:
    return _TIMES[kind].format(text)
