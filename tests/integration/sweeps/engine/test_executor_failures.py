"""The engine: runs that are stopped, fail or sleep, and the run after them, shown on one sweep."""

from __future__ import annotations

import threading
from collections.abc import Callable

from psycopg2.extensions import connection as Connection

from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.conftest import AddStatuses
from tests.integration.sweeps.engine.executed import DUE, SMALL
from tests.internals.engine import RunResult, run_sweep
from tests.internals.ledger import Counts, Run


def test_shutdown_ends_the_run_after_its_batch_and_the_next_resumes(
    add_statuses: AddStatuses, admin: Connection
) -> None:
    # R5
    add_statuses(50, DUE)
    stopping = threading.Event()

    first = run_sweep(SMALL, stopping=stopping, on_batch=lambda counts: stopping.set())
    add_statuses(1, "now() - interval '2 hours'", first_id=1000)
    left: list[bool] = []
    second = run_sweep(SMALL, on_batch=lambda counts: left.append(UserStatus.get_or_none(user_id=1000) is not None))
    add_statuses(1, "now() - interval '2 hours'", first_id=1000)
    third = run_sweep(SMALL)

    assert (first.outcome, first.reason, first.counts["deleted_rows"]) == ("partial", "shutdown", 20)
    assert (second.outcome, second.counts["deleted_rows"]) == ("done", 31)
    assert left == [True, True, True, True, False], "what became due before the cursor comes last"
    assert third.counts["deleted_rows"] == 1, "a run after one that ended well starts at the front again"


def test_run_after_a_failed_one_resumes_from_its_cursor(add_statuses: AddStatuses, last_run: Callable[[], Run]) -> None:
    add_statuses(50, DUE)
    result = run_sweep(SMALL, on_batch=_raise_after(2))

    assert (result.outcome, result.reason) == ("failed", "the disk is full")
    again = run_sweep(SMALL)
    assert (again.outcome, again.counts["deleted_rows"]) == ("done", 30)


def _raise_after(batches: int) -> Callable[[Counts], None]:
    def fail(counts: Counts) -> None:
        if counts["batches"] == batches:
            raise OSError("the disk is full")

    return fail


def test_run_with_heartbeats_is_not_taken_over(add_statuses: AddStatuses) -> None:
    add_statuses(50, DUE)
    others: list[RunResult] = []

    def run_beside(counts: Counts) -> None:
        if not others:
            others.append(run_sweep(SMALL))

    result = run_sweep(SMALL, on_batch=run_beside)

    assert (result.outcome, others[0].outcome) == ("done", "done")
