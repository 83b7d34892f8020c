"""Tables of a database with their sizes, read from the catalog, and the two samples that give their growth."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from housekeeping.database.connection import database
from housekeeping.ledger.schema import TableSize


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """A table of the database. A partitioned table includes its partitions.

    Attributes:
      id: Its oid.
      label: Its name as in SQL, with the schema if it needs one.
      rows: Estimated; None if unknown.
      size: Bytes with indexes and TOAST; None while another session holds an exclusive lock on it.
    """

    id: int
    schema: str
    name: str
    label: str
    rows: int | None
    size: int | None


#: The functions of sizes wait for an exclusive lock. PostgreSQL before 14 has 0 rows for a table never analyzed.
_TABLES: Final = """
WITH locked AS (
    SELECT DISTINCT coalesce(indrelid, relation) AS id
    FROM pg_locks LEFT JOIN pg_index ON indexrelid = relation
    WHERE locktype = 'relation' AND mode = 'AccessExclusiveLock'
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
), parts AS (
    SELECT pg_class.oid AS id, coalesce(pg_partition_root(pg_class.oid)::oid, pg_class.oid) AS root, relkind, relpages,
        reltuples, pg_stat_get_live_tuples(pg_class.oid) AS live, locked.id IS NULL AS is_free
    FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace LEFT JOIN locked ON locked.id = pg_class.oid
    WHERE relkind IN ('r', 'p') AND relpersistence <> 't' AND nspname !~ '^(pg_|information_schema$)'
        AND NOT EXISTS (
            SELECT FROM pg_depend
            WHERE classid = 'pg_class'::regclass AND objid = pg_class.oid AND deptype = 'e'
        )
), sized AS (
    SELECT root, CASE WHEN live > 0 THEN live WHEN reltuples >= 0 AND relpages > 0 THEN reltuples::bigint
            WHEN is_free AND pg_relation_size(id) = 0 THEN 0 END AS rows,
        CASE WHEN is_free THEN pg_total_relation_size(id) END AS size
    FROM parts WHERE relkind = 'r'
), summed AS (
    SELECT root, CASE WHEN count(*) = count(rows) THEN sum(rows) END AS rows,
        CASE WHEN count(*) = count(size) THEN sum(size) END AS size
    FROM sized GROUP BY root
)
SELECT parts.id::bigint, nspname::text, relname::text,
    CASE WHEN pg_table_is_visible(parts.id) THEN '' ELSE quote_ident(nspname) || '.' END || quote_ident(relname),
    CASE WHEN summed.root IS NULL THEN 0 ELSE rows END::bigint,
    CASE WHEN summed.root IS NULL THEN 0 ELSE size END::bigint
FROM parts JOIN pg_class ON pg_class.oid = parts.id JOIN pg_namespace ON pg_namespace.oid = relnamespace
LEFT JOIN summed ON summed.root = parts.id
WHERE parts.id = parts.root ORDER BY nspname, relname
"""
_NAMED: Final = """
SELECT name, coalesce(pg_partition_root(id)::oid, id)::bigint
FROM (SELECT name, to_regclass(name)::oid AS id FROM unnest(%s::text[]) AS name) AS given WHERE id IS NOT NULL
"""
_CASCADES: Final = """
SELECT DISTINCT coalesce(pg_partition_root(confrelid)::oid, confrelid)::bigint,
    coalesce(pg_partition_root(conrelid)::oid, conrelid)::bigint
FROM pg_constraint AS one WHERE contype = 'f' AND confdeltype = 'c'
AND to_jsonb(one) -> 'conenforced' IS DISTINCT FROM 'false'  -- since PostgreSQL 18
"""


def read_tables() -> list[CatalogTable]:
    """Return the tables of the current database, except those of PostgreSQL and of extensions, by one statement.

    Raises:
      peewee.PeeweeException: The catalog cannot be read.
    """
    return [CatalogTable(*row) for row in database.execute_sql(_TABLES).fetchall()]


def read_named(names: Iterable[str]) -> dict[str, int]:
    """Return the oid of each existing table among these names; of a partition, that of its partitioned table.

    Raises:
      peewee.PeeweeException: A name is malformed, or the catalog cannot be read.
    """
    return dict(database.execute_sql(_NAMED, (list(names),)).fetchall())


def read_cascades() -> dict[int, set[int]]:
    """Return table -> the tables that ON DELETE CASCADE deletes from when its rows are deleted; by oid."""
    found: dict[int, set[int]] = {}
    for parent, child in database.execute_sql(_CASCADES).fetchall():
        found.setdefault(parent, set()).add(child)
    return found


#: A second sample within half a day would measure the noise of an hour.
_LEAST_BETWEEN: Final = timedelta(hours=12)
_SAMPLE: Final = """
WITH given AS (
    SELECT * FROM jsonb_to_recordset(%s::jsonb) AS each (schema_name text, table_name text, size bigint)
), gone AS (
    DELETE FROM {samples} AS known WHERE NOT EXISTS (
        SELECT FROM given WHERE (given.schema_name, given.table_name) = (known.schema_name, known.table_name)
    )
)
INSERT INTO {samples} AS known (schema_name, table_name, size, at)
SELECT schema_name, table_name, size, clock_timestamp() FROM given WHERE size IS NOT NULL
ORDER BY schema_name, table_name
ON CONFLICT (schema_name, table_name) DO UPDATE
SET size_before = known.size, before = known.at, size = excluded.size, at = excluded.at
WHERE known.at NOT BETWEEN excluded.at - %s AND excluded.at
"""


def store_sizes(tables: Iterable[CatalogTable]) -> int:
    """Store the size of each table, and keep that of an earlier night. Return the number of stored sizes.

    Raises:
      peewee.PeeweeException: The ledger does not answer.
    """
    sizes = [{"schema_name": each.schema, "table_name": each.name, "size": each.size} for each in tables]
    sql = _SAMPLE.format(samples=f'"{TableSize._meta.schema}".table_sizes')
    stored: int = database.execute_sql(sql, (json.dumps(sizes), _LEAST_BETWEEN)).rowcount
    return stored


def growth_of_tables() -> Mapping[tuple[str, str], int]:
    """Return the growth of each table with two samples, in bytes per day, by schema and name."""
    rows: Any = TableSize.select().where(TableSize.before.is_null(False))
    return {
        (row.schema_name, row.table_name): round(
            (row.size - row.size_before) / ((row.at - row.before) / timedelta(days=1))
        )
        for row in rows
        if row.at > row.before
    }


_OLDEST: Final = """
SELECT name, oldest_at FROM unnest(%s::text[]) AS name, LATERAL (
    SELECT oldest_at FROM {runs} WHERE worker = name AND backlog IS NOT NULL ORDER BY id DESC LIMIT 1
) AS last WHERE oldest_at IS NOT NULL
"""


def oldest_rows(workers: Iterable[str]) -> dict[str, datetime]:
    """Return the time of each worker's oldest stale row at the end of the last run that counted its backlog."""
    sql = _OLDEST.format(runs=f'"{TableSize._meta.schema}".runs')
    return dict(database.execute_sql(sql, (list(workers),)).fetchall())
