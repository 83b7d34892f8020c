"""Redelivered messages whose first delivery sleeps at the start of its run (I1)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from psycopg2.extensions import connection as Connection

from tests.internals.database import Database
from tests.internals.ledger import RunStart, runs

PATIENCE_S = 20


def begin() -> RunStart | None:
    return runs.begin("work", message_id="message-1", tick=None, trigger="enqueue", lease=None)


def test_delivery_that_waited_for_the_completing_commit_starts_no_run(postgres: Database, admin: Connection) -> None:
    first = begin()
    assert first is not None

    def again() -> RunStart | None:
        try:
            return begin()
        finally:
            postgres.close()

    with ThreadPoolExecutor(1) as another, postgres.atomic():
        runs.finish(first.run_id, "done", None, counts={}, cursor=None)
        second = another.submit(again)
        await_waiting(admin)

    assert second.result(PATIENCE_S) is None


def test_run_that_waited_for_a_done_run_starts_at_the_front(postgres: Database, admin: Connection) -> None:
    # Not where one before that had been interrupted: what has become due there meanwhile would wait for the next run.
    place = {"pass": "rows", "after": [3]}

    def of(message_id: str) -> RunStart:
        begun = runs.begin(
            "worker", message_id=message_id, tick=None, trigger="enqueue", lease=("worker", f"token of {message_id}")
        )
        assert begun is not None and begun.fence is not None
        return begun

    def third() -> RunStart:
        try:
            return of("third")
        finally:
            postgres.close()

    interrupted = of("first")
    runs.finish(interrupted.run_id, "failed", None, counts={}, cursor=place)
    last = of("second")
    with ThreadPoolExecutor(1) as another, postgres.atomic():
        runs.finish(last.run_id, "done", None, counts={}, cursor=None, fence=last.fence)
        waiting = another.submit(third)
        await_waiting(admin)

    assert (last.cursor, waiting.result(PATIENCE_S).cursor) == (place, None)


def await_waiting(admin: Connection) -> None:
    """Until a session waits for the end of another's transaction."""
    deadline = time.monotonic() + PATIENCE_S
    with admin.cursor() as cursor:
        while time.monotonic() < deadline:
            cursor.execute(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted AND pid IN "
                "(SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'housekeeping%')"
            )
            if cursor.fetchone() != (0,):
                return
    raise AssertionError("nobody waits")
