"""Table of events with a partition for each of the last months of 2025, and sweeps that drop the old ones."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from peewee import BigIntegerField, BooleanField, CompositeKey

from housekeeping import BaseModel, DropPartitions, Sweep, UtcDateTimeField
from housekeeping.testing.stubs import ManualClock
from tests.internals.database import database
from tests.internals.engine import RunResult, run_sweep
from tests.internals.ledger import NOW as DATABASE_NOW
from tests.internals.ledger import DetachedPartition, Run, runs

NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)
#: Partition -> its range. The first two are over for longer than `AGE`.
MONTHS: Final = {
    "events_09": ("2025-09-01", "2025-10-01"),
    "events_10": ("2025-10-01", "2025-11-01"),
    "events_11": ("2025-11-01", "2025-12-01"),
    "events_12": ("2025-12-01", "2026-01-01"),
}
#: Left of them when the others are dropped.
KEPT: Final = ["events_11", "events_12"]
#: Up to 22 November.
AGE: Final = timedelta(days=40)
ROWS: Final = 10  # in each partition


class Event(BaseModel):
    id = BigIntegerField()
    happened_at = UtcDateTimeField()
    exported = BooleanField(null=True)

    class Meta:
        table_name = "events"
        primary_key = CompositeKey("id", "happened_at")


def concurrently(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of partitions that are detached concurrently."""
    pytest.mark.direct_only(reason="partitions are not detached concurrently through a pooler")(test)
    pytest.mark.usefixtures("postgres_14")(test)
    return test


def sweep(**given: Any) -> Sweep:
    """Return a sweep that drops old events, with further options of its stage."""
    options = {"older_than": AGE, "lock_timeout": timedelta(milliseconds=300), **given}
    return Sweep("shop.old_events", DropPartitions(Event, "happened_at", **options))


def exported(row: Any) -> Any:
    """Condition of events that need not be kept."""
    return row.exported == True  # noqa: E712


def create(*, has_default: bool = False) -> None:
    """Create the table again, with ten exported events in each month."""
    database.execute_sql("DROP TABLE IF EXISTS events CASCADE")
    for name in MONTHS:
        database.execute_sql(f"DROP TABLE IF EXISTS {name}")
    database.execute_sql(
        "CREATE TABLE events (id bigint, happened_at timestamptz NOT NULL, exported boolean, "
        "PRIMARY KEY (id, happened_at)) PARTITION BY RANGE (happened_at)"
    )
    for name, (start, end) in MONTHS.items():
        database.execute_sql(f"CREATE TABLE {name} PARTITION OF events FOR VALUES FROM ('{start}') TO ('{end}')")
        database.execute_sql(
            "INSERT INTO events SELECT n, %s::timestamptz + n * interval '1 day', true "
            "FROM generate_series(1, %s) AS n",
            (start, ROWS),
        )
    if has_default:
        database.execute_sql("CREATE TABLE events_other PARTITION OF events DEFAULT")


def run(of: Sweep, now: datetime = NOW) -> RunResult:
    """Run the sweep at this time."""
    return run_sweep(of, clock=ManualClock(now))


def close_killed_runs() -> None:
    """Let the next run consider open runs dead."""
    Run.update(heartbeat_at=DATABASE_NOW - 2 * runs.SILENCE).where(Run.outcome.is_null()).execute()


def partitions() -> list[str]:
    """Return the names of the partitions that are attached."""
    rows = database.execute_sql(
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = to_regclass('events') ORDER BY 1"
    )
    return [name for (name,) in rows]


def tables() -> list[str]:
    """Return the names of all tables of the application, without the partitioned one."""
    rows = database.execute_sql(
        "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace "
        "AND relname LIKE %s ORDER BY 1",
        ("events%",),
    )
    return [name for (name,) in rows]


def recorded() -> list[str]:
    """Return the names of the partitions that the ledger has as being detached."""
    return [row.name.rpartition(".")[2] for row in DetachedPartition.select().order_by(DetachedPartition.name)]


def comment_of(table: str) -> str | None:
    """Return the comment of a table."""
    row: Any = database.execute_sql("SELECT obj_description(to_regclass(%s), 'pg_class')", (table,)).fetchone()
    found: str | None = row[0]
    return found
