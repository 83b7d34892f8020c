"""A purge that is killed at every point, and then resumed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from housekeeping.testing.points import Ended, run_in_process
from tests.integration.purge.conftest import ADD_SESSIONS, EXPIRED, Left, purge
from tests.internals.database import Database
from tests.internals.engine import PurgeRequest, request_of
from tests.internals.ledger import NOW, SILENCE, Override, Run, operators
from tests.session_settings import NEEDS_SESSION

#: A new process for each point.
pytestmark = pytest.mark.slow

REQUEST = PurgeRequest(table="sessions", where=EXPIRED, batch_size=3, max_rows=8)


def paused_after_a_batch() -> PurgeRequest:
    """Purge until the first batch is committed, and return the request that resumes it."""
    result = purge(REQUEST, on_batch=lambda counts: operators.switch(Override(REQUEST.worker, "paused")))
    operators.resume(REQUEST.worker)
    assert result.run_id is not None and result.reason == "paused"
    return request_of(result.run_id)


def killed_at_each_point(postgres: Database, first: Callable[[], PurgeRequest]) -> Iterator[tuple[PurgeRequest, Ended]]:
    """Kill a purge before each of its points, each time with all rows there; yield the request, and what was done."""
    alive = random.getrandbits(62)
    for number in itertools.count():
        Run.delete().execute()
        postgres.execute_sql(f"TRUNCATE sessions; {ADD_SESSIONS}")
        request = first()
        ended = run_in_process(lambda request=request: purge(request).outcome, number, alive)  # type: ignore[misc]
        # The server has noticed that the process is gone.
        postgres.execute_sql("SELECT pg_advisory_lock(%s), pg_advisory_unlock(%s)", (alive, alive))
        if not ended.killed:
            return
        yield request, ended


def resume(request: PurgeRequest) -> None:
    """Finish what the killed process has begun, if it did not end."""
    last = Run.select().order_by(Run.id.desc()).first()
    if last is None or last.id == request.resumes:
        purge(request)
    elif last.outcome is None and deleted() < 8:
        Run.update(heartbeat_at=NOW - 2 * SILENCE).where(Run.id == last.id).execute()
        purge(request_of(last.id))


def deleted() -> int:
    return sum(run.counts.get("deleted_rows", 0) for run in Run.select())


@NEEDS_SESSION
@pytest.mark.parametrize("first", [lambda: REQUEST, paused_after_a_batch], ids=["new", "resumed"])
def test_purge_killed_at_any_point_is_resumed(
    sessions: Left, postgres: Database, first: Callable[[], PurgeRequest]
) -> None:
    points = []

    for request, ended in killed_at_each_point(postgres, first):
        points = ended.points
        assert deleted() == 12 - len(sessions()), f"not counted before {points[-1]}"
        resume(request)
        assert (deleted(), sessions()) == (8, [9, 10, 11, 12]), f"not resumed before {points[-1]}"

    assert sum("DELETE FROM" in point for point in points) >= 1
