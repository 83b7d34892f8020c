"""Schema of the library's tables that is handed from test to test, because to create and drop it takes longest.

A test gets it under its own name, empty. It is handed on only if the test left its definition and statistics alone.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

_SPARE: Final = "spare_own"
_LOCK_MS: Final = 500  # a test that left a transaction open keeps its schema
#: Every object in the schema and what defines it, each with the transaction that last changed it. Prepared, because to
#: plan it takes longer than to execute it.
_DEFINITION: Final = """
PREPARE definition (regnamespace) AS
WITH relations AS (SELECT oid, xmin FROM pg_class WHERE relnamespace = $1),
changed AS (
    SELECT oid, xmin FROM relations
    UNION ALL SELECT attrelid, xmin FROM pg_attribute WHERE attrelid IN (SELECT oid FROM relations)
    UNION ALL SELECT oid, xmin FROM pg_constraint WHERE connamespace = $1
    UNION ALL SELECT oid, xmin FROM pg_trigger WHERE tgrelid IN (SELECT oid FROM relations)
    UNION ALL SELECT indexrelid, xmin FROM pg_index WHERE indrelid IN (SELECT oid FROM relations)
    UNION ALL SELECT objid, xmin FROM pg_depend
        WHERE refclassid = 'pg_namespace'::regclass AND refobjid = $1
           OR refclassid = 'pg_class'::regclass AND refobjid IN (SELECT oid FROM relations)
)
SELECT md5(string_agg(format('%s:%s', oid, xmin), ',' ORDER BY oid, xmin::text)),
       (SELECT nspacl IS NULL FROM pg_namespace WHERE oid = $1),
       EXISTS (SELECT FROM pg_statistic WHERE starelid IN (SELECT oid FROM relations))
FROM changed
"""
#: Tables that have had rows, and whether PostgreSQL has analyzed the table or it has ten pages. Such a table is
#: truncated, which is slow. The others only lose their rows: the planner takes a smaller table for one of ten pages.
_USED: Final = """
SELECT oid::regclass::text, reltuples >= 0 OR pg_relation_size(oid) >= 10 * current_setting('block_size')::int
FROM pg_class
WHERE relnamespace = %(schema)s::regnamespace AND relkind = 'r' AND relname <> 'migrations'
  AND (pg_relation_size(oid) > 0 OR reltuples >= 0)
"""
_RESTART: Final = """
SELECT setval(seqrelid::regclass, 1, false) FROM pg_sequence JOIN pg_class ON pg_class.oid = seqrelid
WHERE relnamespace = %(schema)s::regnamespace AND pg_sequence_last_value(seqrelid) IS NOT NULL
"""
#: The changes of many tests would add up until autovacuum analyzes the table within one of them.
_FORGET: Final = """
SELECT pg_stat_reset_single_table_counters(oid) FROM pg_class
WHERE relnamespace = %(schema)s::regnamespace AND relkind = 'r'
"""


class SpareSchema:
    """The schema between two tests, while there is one."""

    def __init__(self, url: str) -> None:
        self._admin: Final[Connection] = psycopg2.connect(url, options=f"-c lock_timeout={_LOCK_MS}")
        self._admin.autocommit = True
        with self._admin.cursor() as cursor:
            cursor.execute(_DEFINITION)
        self._kept: tuple[Any, ...] | None = None

    def give(self, schema: str) -> None:
        """Rename the spare schema to this name; without one the test creates its own."""
        if self._kept is None:
            return
        try:
            with self._admin.cursor() as cursor:
                cursor.execute(f"ALTER SCHEMA {_SPARE} RENAME TO {schema}")
        except psycopg2.Error:  # another test has restarted the server
            self._kept = None

    def created(self, schema: str) -> None:
        """Remember the definition of a schema that the test had to create, before the test changes it."""
        if self._kept is None:
            with suppress(psycopg2.Error), self._admin.cursor() as cursor:
                self._kept = self._definition(cursor, schema)

    def take_back(self, schema: str) -> None:
        """Empty the schema and keep it, unless the test changed more than rows."""
        given, self._kept = self._kept, None
        with suppress(psycopg2.Error), self._admin.cursor() as cursor:
            if self._definition(cursor, schema) == given:
                is_changed = self._empty(cursor, schema)
                cursor.execute(f"ALTER SCHEMA {schema} RENAME TO {_SPARE}")
                self._kept = self._definition(cursor, _SPARE) if is_changed else given

    def close(self) -> None:
        with suppress(psycopg2.Error), self._admin.cursor() as cursor:
            cursor.execute(f"DROP SCHEMA IF EXISTS {_SPARE} CASCADE")
        self._admin.close()

    def _empty(self, cursor: Cursor, schema: str) -> bool:
        """Remove all rows; return whether that changed the definition."""
        about = {"schema": schema}
        cursor.execute(_USED, about)
        used = dict(cursor.fetchall())
        for table, is_large in used.items():
            cursor.execute(f"TRUNCATE {table}" if is_large else f"DELETE FROM {table}")
        cursor.execute(_RESTART, about)
        cursor.execute(_FORGET, about)
        return any(used.values())

    def _definition(self, cursor: Cursor, schema: str) -> tuple[Any, ...]:
        cursor.execute(f"EXECUTE definition ('{schema}')")
        found: tuple[Any, ...] = cursor.fetchall()[0]
        cursor.execute(f"SELECT version, applied_at FROM {schema}.migrations ORDER BY version")
        return (*found, *cursor.fetchall())
