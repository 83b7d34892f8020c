"""Table of an application whose old rows are archived, with columns that its model does not declare."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from peewee import BigAutoField

from housekeeping import BaseModel, Delete, Guard, Lease, Limits, Rows, Sweep, UtcDateTimeField
from tests.declarations import changed
from tests.internals.database import database
from tests.internals.sweeps import problems_of

NOW: Final = datetime(2026, 5, 1, tzinfo=UTC)
#: The columns that an archive adds; each run has others.
ADDED: Final = ("archived_at", "archived_by_run")


class Ticket(BaseModel):
    id = BigAutoField()
    closed_at = UtcDateTimeField()


def create() -> None:
    """Create the table of tickets."""
    database.execute_sql(
        "CREATE TABLE ticket (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, closed_at timestamptz NOT NULL, "
        "email text UNIQUE, price numeric(10, 3), tags text[], contents jsonb, "
        "gross numeric GENERATED ALWAYS AS (price * 2) STORED)"
    )


def fill(stale: int = 5, kept: int = 2) -> None:
    """Add tickets closed an hour before `NOW`, and some that are closed later."""
    database.execute_sql(
        "INSERT INTO ticket (closed_at, email, price, tags, contents) SELECT "
        "%s::timestamptz + CASE WHEN n <= %s THEN interval '-1 hour' ELSE interval '1 hour' END, 'user' || n, "
        "n + 0.125, ARRAY['a', n::text], jsonb_build_object('n', n, 'x', NULL) FROM generate_series(1, %s) AS n",
        (NOW, stale, stale + kept),
    )


def sweep(action: Any = None, lease: Lease | None = None, **options: Any) -> Sweep:
    rows = Rows(
        Ticket,
        stale=lambda row, now: row.closed_at <= now,
        order="closed_at",
        action=action or Delete(archive_to="old_tickets"),
    )
    declared = Sweep(
        "tickets.closed", rows, lease=lease, limits=Limits(batch=2, batch_takes=None), guard=Guard(first_run=False)
    )
    return changed(declared, **options)


def leased(**options: Any) -> Sweep:
    return sweep(lease=Lease("tickets.closed", timedelta(minutes=10)), **options)


def create_archives(of: Sweep) -> None:
    """Create the archives of a sweep, as ``housekeeping init --with-archives`` does."""
    for problem in problems_of(of.declared_stages()):
        for statement in problem.statements:
            database.execute_sql(statement)


def rows(table: str = "ticket") -> list[str]:
    """Return the rows of a table as texts, without the columns that an archive adds."""
    query = f"SELECT (to_jsonb(t) - '{ADDED[0]}' - '{ADDED[1]}')::text FROM {table} AS t ORDER BY id"
    return [text for (text,) in database.execute_sql(query)]


def value(sql: str) -> Any:
    """Return the only value of a query."""
    return database.execute_sql(sql).fetchone()[0]
