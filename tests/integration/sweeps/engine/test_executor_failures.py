"""The engine: runs that are stopped, fail or sleep, and the run after them, shown on one sweep."""

from __future__ import annotations

import threading
from collections.abc import Callable

from psycopg2.extensions import connection as Connection

from housekeeping.core.settings import Settings
from housekeeping.database.connection import Database
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.ledger.runs import Counts
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.conftest import AddStatuses
from tests.integration.sweeps.engine.executed import DUE, SMALL


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


def test_run_that_lost_the_database_fails_with_committed_counts(
    add_statuses: AddStatuses, admin: Connection, postgres: Database, last_run: Callable[[], Run]
) -> None:
    add_statuses(50, DUE)

    def cut(counts: Counts) -> None:
        if counts["batches"] == 2:
            with admin.cursor() as cursor:
                cursor.execute(
                    "CREATE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS "
                    "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN OLD; END $$;"
                    "CREATE TRIGGER cut BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION cut()"
                )

    result = run_sweep(SMALL, on_batch=cut)

    assert result.outcome == "failed" and result.reason is not None and result.reason.startswith("database: ")
    assert result.counts["deleted_rows"] == 20
    assert (last_run().outcome, last_run().counts["deleted_rows"]) == ("failed", 20)
    assert UserStatus.select().count() == 30


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


def test_zombie_commits_nothing_after_a_takeover(
    add_statuses: AddStatuses, admin: Connection, settings: Settings
) -> None:
    # A run that only slept and was marked as lost adds no second row.
    add_statuses(50, DUE)
    others: list[RunResult] = []

    def sleep_and_be_taken_over(counts: Counts) -> None:
        if counts["batches"] == 1 and not others:
            with admin.cursor() as cursor:
                cursor.execute(f"UPDATE {settings.schema_name}.runs SET heartbeat_at = now() - interval '61 seconds'")
            others.append(run_sweep(SMALL))

    zombie = run_sweep(SMALL, on_batch=sleep_and_be_taken_over)

    assert (others[0].outcome, others[0].counts["deleted_rows"]) == ("done", 40)
    assert (zombie.outcome, zombie.reason) == ("lost_lease", "taken_over")
    rows = list(Run.select(Run.outcome, Run.counts).order_by(Run.id))
    assert [row.outcome for row in rows] == ["lost", "done"]
    assert sum(row.counts["deleted_rows"] for row in rows) == 50


def test_run_with_heartbeats_is_not_taken_over(add_statuses: AddStatuses) -> None:
    add_statuses(50, DUE)
    others: list[RunResult] = []

    def run_beside(counts: Counts) -> None:
        if not others:
            others.append(run_sweep(SMALL))

    result = run_sweep(SMALL, on_batch=run_beside)

    assert (result.outcome, others[0].outcome) == ("done", "done")
