"""pg_partman with the same retention on the same table leaves the same partitions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from peewee import BareField
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, DropPartitions, Settings, Sweep, UtcDateTimeField
from tests.internals.database import Database, database
from tests.internals.engine import run_sweep

#: pg_partman takes over a second to create and drop the partitions of each table.
pytestmark = pytest.mark.slow


class Visit(BaseModel):
    page = BareField()
    happened_at = UtcDateTimeField()

    class Meta:
        table_name = "visits"
        primary_key = False


@pytest.fixture
def partman(postgres: Database, settings: Settings, admin: Connection) -> str:
    """The schema of pg_partman, which is that of the test, so that it is removed with it."""
    with admin.cursor() as cursor:
        cursor.execute("SELECT FROM pg_available_extensions WHERE name = 'pg_partman'")
        if cursor.rowcount == 0:
            pytest.skip("this PostgreSQL has no pg_partman (Debian: postgresql-15-partman)")
        cursor.execute(f"CREATE EXTENSION pg_partman SCHEMA {settings.namespace}")
    return settings.namespace


def _create(schema: str, unit: str, number: int) -> None:
    """Create partitions for the last months, weeks or days by pg_partman, and the same ones of another table."""
    for table in ("reference", "visits"):
        database.execute_sql(
            f"CREATE TABLE {table} (page text, happened_at timestamptz NOT NULL) PARTITION BY RANGE (happened_at)"
        )
    (version,) = database.execute_sql(
        "SELECT split_part(extversion, '.', 1)::int FROM pg_extension WHERE extname = 'pg_partman'"
    ).fetchone()
    old_names = {"month": "monthly", "week": "weekly", "day": "daily"}
    kind, interval = ("native", old_names[unit]) if version < 5 else ("range", f"1 {unit}")
    database.execute_sql(
        f"SELECT {schema}.create_parent(p_parent_table := %s, p_control := 'happened_at', p_type := %s, "
        "p_interval := %s, p_start_partition := date_trunc(%s, now() - %s * %s::interval)::text)",
        (f"{schema}.reference", kind, interval, unit, number, f"1 {unit}"),
    )
    for bounds, name in _partitions("reference"):
        copy = name.replace("reference", "visits")
        database.execute_sql(f"CREATE TABLE {copy} PARTITION OF visits {bounds}")


def _partitions(table: str) -> list[tuple[str, str]]:
    """Return the bounds and the name of each partition."""
    rows = database.execute_sql(
        "SELECT pg_get_expr(relpartbound, oid), relname::text FROM pg_class WHERE relispartition AND oid IN "
        "(SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass(%s)) ORDER BY 1",
        (table,),
    )
    return [(bounds, name) for bounds, name in rows]


@pytest.mark.parametrize(
    ("unit", "number", "age"),
    [
        ("month", 8, "90 days"),
        ("month", 3, "10 days"),
        ("week", 10, "15 days"),
        ("day", 20, "7 days"),
        ("day", 3, "9 days"),
    ],
)
def test_same_retention_leaves_the_same_partitions(partman: str, unit: str, number: int, age: str) -> None:
    _create(partman, unit, number)
    before: Any = {bounds for bounds, _ in _partitions("visits")}
    old = Sweep("shop.old_visits", DropPartitions(Visit, "happened_at", older_than=timedelta(days=int(age.split()[0]))))

    database.execute_sql(f"UPDATE {partman}.part_config SET retention = %s, retention_keep_table = false", (age,))
    database.execute_sql(f"SELECT {partman}.run_maintenance(%s)", (f"{partman}.reference",))
    result = run_sweep(old)

    kept = {bounds for bounds, _ in _partitions("visits")}
    # pg_partman also creates the partitions of the future.
    assert result.outcome == "done", result.error
    assert kept == {bounds for bounds, _ in _partitions("reference")} & before
    assert result.counts["dropped_partitions"] == len(before) - len(kept)
