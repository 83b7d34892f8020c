"""The statements that the library sends, for tests that count them or do something right before one.

`end_session` is for tests in which the server ends a connection between two of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.internals.database import Database


def watch_statements(patch: pytest.MonkeyPatch, before: Callable[[str], object], *, with_values: bool = False) -> None:
    """Call `before` with the text of each statement right before it is sent, with its values or placeholders for them.

    From its second execution, a statement in one round trip is prepared: then the text is ``EXECUTE``.
    """
    execute_sql, fetch_at_once = Database.execute_sql, Database.fetch_at_once

    def with_parameters(self: Database, sql: str, params: Any = None) -> Any:
        values = with_values and params
        before(self.connection().cursor().mogrify(sql, params).decode() if values else sql)
        return execute_sql(self, sql, params)

    def at_once(self: Database, text: bytes) -> Any:
        before(text.decode())
        return fetch_at_once(self, text)

    patch.setattr(Database, "execute_sql", with_parameters)
    patch.setattr(Database, "fetch_at_once", at_once)


def end_session(cursor: Any, pid: int) -> None:
    """End the session of a server process, and wait until it has gone. PostgreSQL 13 has no function that waits."""
    cursor.execute("SELECT pg_terminate_backend(%s)", (pid,))
    deadline = time.monotonic() + 20
    while True:
        cursor.execute("SELECT FROM pg_stat_activity WHERE pid = %s", (pid,))
        if not cursor.rowcount:
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_rows(plan: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield each scan of a plan with the rows that it has read."""
    if plan["Node Type"].endswith("Scan"):
        removed = plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
        yield plan["Node Type"], (plan["Actual Rows"] + removed) * plan["Actual Loops"]
    for child in plan.get("Plans", ()):
        yield from read_rows(child)
