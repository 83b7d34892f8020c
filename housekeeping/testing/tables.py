"""Tables that a sweep may change: copies of their contents, differences from a copy, and restoring them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import psycopg2
from peewee import Model
from psycopg2.errors import LockNotAvailable

from housekeeping.core.errors import Refused
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.partitions.stage import PartitionStage
from housekeeping.sweeps.stages.table_stage import TableStage

#: Rows per table. A larger table may not be a test's, and must not be emptied and refilled.
MOST_ROWS: Final = 10_000
_SHOWN: Final = 3  # rows per kind and table

#: The tables in the search path and those of the sweep, without the library's own and those of extensions. Partitions
#: are listed instead of their parent. As far as possible, referenced tables come first.
_TABLES: Final = """
WITH RECURSIVE tables (id) AS (
    SELECT pg_class.oid FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE relkind = 'r' AND relpersistence <> 't' AND nspname <> %(own)s
    AND (
        nspname = ANY(current_schemas(false))
        OR pg_class.oid IN (SELECT to_regclass(name) FROM unnest(%(named)s::text[]) AS name)
    )
    AND NOT EXISTS (SELECT FROM pg_depend WHERE objid = pg_class.oid AND deptype = 'e')
), levels (id, level) AS (
    SELECT id, 0 FROM tables
    UNION
    SELECT conrelid, level + 1 FROM levels JOIN pg_constraint ON confrelid = levels.id AND contype = 'f'
    WHERE conrelid <> confrelid AND level < 20
)
SELECT
    id::regclass::text,
    ARRAY(
        SELECT quote_ident(attname) FROM pg_attribute
        WHERE attrelid = id AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum
    ),
    ARRAY(SELECT quote_ident(tgname) FROM pg_trigger WHERE tgrelid = id AND NOT tgisinternal AND tgenabled = 'O')
FROM tables JOIN levels USING (id) GROUP BY id ORDER BY max(level), 1
"""
#: A sweep writes the database's time of each change, which differs between two runs.
_COMPARABLE: Final = r"""
CREATE FUNCTION pg_temp.housekeeping_comparable(contents jsonb, since timestamptz) RETURNS jsonb LANGUAGE sql AS $$
    SELECT jsonb_object_agg(key, CASE
        WHEN value #>> '{}' !~ '^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?([+-]\d\d(:\d\d)?)?$' THEN value
        WHEN (value #>> '{}')::timestamptz BETWEEN since AND clock_timestamp() THEN '"a time during this test"'
        ELSE value
    END) FROM jsonb_each(contents)
$$
"""
_DIFFERENCES: Final = """
WITH kept (contents) AS (
    SELECT pg_temp.housekeeping_comparable(to_jsonb(one) - %(ignoring)s::text[], %(since)s) FROM {copy} AS one
), found (contents) AS (
    SELECT pg_temp.housekeeping_comparable(to_jsonb(one) - %(ignoring)s::text[], %(since)s) FROM {table} AS one
)
SELECT '-', gone.contents::text FROM (SELECT * FROM kept EXCEPT ALL SELECT * FROM found) AS gone
UNION ALL SELECT '+', come.contents::text FROM (SELECT * FROM found EXCEPT ALL SELECT * FROM kept) AS come
"""

_PARTS: Final = """
SELECT to_regclass(%(name)s)::text UNION SELECT relid::text FROM pg_partition_tree(to_regclass(%(name)s))
"""


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    columns: Sequence[str]
    triggers: Sequence[str]


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences between a table and its copy.

    Attributes:
      gone: Rows that are only in the copy, as JSON.
      come: Rows that are only in the table.
    """

    table: str
    gone: Sequence[str]
    come: Sequence[str]

    def __str__(self) -> str:
        lines = [f"  table {self.table}:"]
        for sign, rows in (("-", self.gone), ("+", self.come)):
            lines += [f"    {sign} {row}" for row in rows[:_SHOWN]]
            if len(rows) > _SHOWN:
                lines.append(f"    {sign} ... and {len(rows) - _SHOWN} more")
        return "\n".join(lines)


class Tables:
    """All tables in the database's search path and those of the sweep, on a connection of its own.

    Raises:
      Refused: When no database is set, there is no table, or the connection leads through a pooler.
    """

    def __init__(self, sweep: Sweep) -> None:
        if database.obj is None:
            raise Refused("no database is set; use the fixture housekeeping_database, or call housekeeping.install")
        if database.in_transaction():
            raise Refused("a transaction is open on the library's connection; end it, because runs do not see its rows")
        if database.prepared() is None:
            raise Refused(
                "the connection leads through a pooler, which keeps no session; use the URL of PostgreSQL itself"
            )
        stages = sweep.stages_for_run()
        if any(isinstance(each, PartitionStage) for each in stages):
            raise Refused(f"{sweep.name}: tables that it drops cannot be restored; test it by run_sweep and plan")
        models = [each.model for each in stages if isinstance(each, TableStage)]
        self.connection = psycopg2.connect(dbname=database.obj.database, **database.obj.connect_params)
        self.connection.autocommit = True
        self.run(_COMPARABLE)
        self._since = self.run("SELECT clock_timestamp()")[0][0]
        ledger: Any = Run._meta
        found = self.run(_TABLES, {"own": ledger.schema, "named": [quoted_name(model) for model in models]})
        self._tables = [_Table(*row) for row in found]
        if not self._tables:
            self.connection.close()
            raise Refused(f"{sweep.name}: there is no table in the search path of the database")

    def run(self, sql: str, parameters: Any = None) -> list[Any]:
        """Execute a statement and return its rows."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return list(cursor.fetchall()) if cursor.description else []

    def save(self, copy: str) -> None:
        """Copy the contents of the tables under this name.

        Raises:
          Refused: When a table has too many rows for a test.
        """
        for number, table in enumerate(self._tables):
            (rows,) = self.run(f"SELECT count(*) FROM (SELECT FROM {table.name} LIMIT {MOST_ROWS + 1}) AS counted")[0]  # noqa: S608
            if rows > MOST_ROWS:
                raise Refused(
                    f"{table.name} has more than {MOST_ROWS:,} rows: this is for a few rows in a test's own schema"
                )
            self.run(f"CREATE TEMPORARY TABLE {_copy(copy, number)} AS TABLE {table.name}")

    def restore(self, copy: str) -> None:
        """Restore the contents from the copy.

        Raises:
          Refused: When another session has locked a table.
        """
        try:
            self._restore(copy)
        except LockNotAvailable:
            raise Refused("the tables are locked: a session of this test has an open transaction") from None

    def _restore(self, copy: str) -> None:
        statements = [f"TRUNCATE {', '.join(table.name for table in self._tables)}", "SET CONSTRAINTS ALL DEFERRED"]
        for number, table in enumerate(self._tables):
            columns = ", ".join(table.columns)
            statements += [f"ALTER TABLE {table.name} DISABLE TRIGGER {trigger}" for trigger in table.triggers]
            statements.append(
                f"INSERT INTO {table.name} ({columns}) OVERRIDING SYSTEM VALUE "  # noqa: S608
                f"SELECT {columns} FROM {_copy(copy, number)}"
            )
        # Triggers can be enabled only when no constraint check is pending.
        statements.append("SET CONSTRAINTS ALL IMMEDIATE")
        for table in self._tables:
            statements += [f"ALTER TABLE {table.name} ENABLE TRIGGER {trigger}" for trigger in table.triggers]
        self.run(";\n".join(statements))  # one transaction, because they are sent together

    def differences(self, copy: str, ignoring: Sequence[str] = ()) -> list[Difference]:
        """Return the differences from the copy, except in ignored columns and in times of changes."""
        found: list[Difference] = []
        for number, table in enumerate(self._tables):
            sql = _DIFFERENCES.format(copy=_copy(copy, number), table=table.name)
            parameters = {"ignoring": list(ignoring), "since": self._since}
            rows: list[tuple[str, str]] = sorted(self.run(sql, parameters), key=lambda row: row[1])
            if rows:
                sides = ([row for sign, row in rows if sign == side] for side in "-+")
                found.append(Difference(table.name, *sides))
        return found

    def changed_rows(self, copy: str, model: type[Model], ignoring: Sequence[str] = ()) -> int:
        """Return how many rows of the model's table were changed or removed since the copy, partitions included."""
        names = {name for (name,) in self.run(_PARTS, {"name": quoted_name(model)})}
        return sum(len(each.gone) for each in self.differences(copy, ignoring) if each.table in names)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.connection.close()


def _copy(name: str, number: int) -> str:
    return f"pg_temp.housekeeping_{name}_{number}"


#: Returns a sweep's effects outside of PostgreSQL, as a value that can be compared and shown.
Outside = Callable[[], object]
