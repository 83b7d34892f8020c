"""The table that the tests purge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from housekeeping.database.connection import Database

#: The ids that are left.
Left = Callable[[], list[int]]
EXPIRED: Final = "expires_at < now()"
#: Adds twelve sessions; the first ten have expired, the first of them ten days ago.
ADD_SESSIONS: Final = (
    "INSERT INTO sessions SELECT n, 'note ' || n, now() + (n - 10.5) * interval '1 day' FROM generate_series(1, 12) n"
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
