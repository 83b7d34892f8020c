"""The table that the tests purge, and a purge of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest

from housekeeping import Sweep
from tests.declarations import changed
from tests.internals.database import Database
from tests.internals.engine import PurgeRequest, RunResult, run_sweep, sweep_of

#: The ids that are left.
Left = Callable[[], list[int]]
EXPIRED: Final = "expires_at < now()"
#: Adds twelve sessions; the first ten have expired, the first of them ten days ago.
ADD_SESSIONS: Final = (
    "INSERT INTO sessions SELECT n, 'note ' || n, now() + (n - 10.5) * interval '1 day' FROM generate_series(1, 12) n"
)


def purge(
    request: PurgeRequest, declared: Iterable[Sweep] = (), *, sweep: Sweep | None = None, **options: Any
) -> RunResult:
    """Run a purge as its command does, but in batches of one size.

    Parameters:
      declared: The sweeps of the application.
      sweep: Replaces that of the request.
    """
    return run_sweep(
        sweep or changed(sweep_of(request, declared), batch_takes=None),
        confirmed=True,
        max_rows=request.max_rows,
        resumes=request.resumes,
        noted=request.as_count(),
        **options,
    )


@pytest.fixture
def sessions(postgres: Database) -> Left:
    """The table with twelve sessions, of which ten have expired."""
    postgres.execute_sql(
        "CREATE TABLE sessions (id integer PRIMARY KEY, note text, expires_at timestamptz NOT NULL);" + ADD_SESSIONS
    )

    def left() -> list[int]:
        return [row[0] for row in postgres.execute_sql("SELECT id FROM sessions ORDER BY id").fetchall()]

    return left
