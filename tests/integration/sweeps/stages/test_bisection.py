"""Rows that are slow, or wait for a lock, fail alone; a database on which everything times out fails the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Delete, Guard, Limits, Sweep, Throttle
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.declarations import changed, stage_of
from tests.integration.conftest import AddStatuses, Locked, Plant
from tests.integration.sweeps.engine.executed import SMALL
from tests.integration.sweeps.engine.sizing import DUE, Impatient
from tests.internals.database import database
from tests.internals.engine import batches, run_sweep
from tests.internals.ledger import Run
from tests.internals.sweeps import TableStage, bad_rows
from tests.internals.workers import status_sweep as sweep
from tests.session_settings import set_in_session

#: Makes the deletion of the statuses that the SQL condition holds for do this first, in PL/pgSQL.
OnDelete = Callable[[str, str], None]


@pytest.fixture
def on_delete(statuses: type[UserStatus], plant: Plant) -> OnDelete:
    return partial(plant, "DELETE ON user_statuses")


def _left() -> list[int]:
    return [row.user_id for row in UserStatus.select().order_by(UserStatus.user_id)]


@pytest.mark.parametrize("slow", [1, 350])
def test_row_slower_than_the_statement_timeout_fails_alone(
    add_statuses: AddStatuses, on_delete: OnDelete, reported: list[dict[str, Any]], slow: int
) -> None:
    add_statuses(350, DUE)
    on_delete(f"OLD.user_id = {slow}", "PERFORM pg_sleep(60)")
    set_in_session(database, "statement_timeout = '300ms'")

    result = run_sweep(sweep)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 349, 1)
    assert _left() == [slow]


def test_row_whose_trigger_waits_for_a_lock_fails_alone(
    add_statuses: AddStatuses, on_delete: OnDelete, admin: Connection, locked: Locked
) -> None:
    add_statuses(30, DUE)
    with admin.cursor() as cursor:
        cursor.execute("CREATE TABLE totals (number integer); INSERT INTO totals VALUES (50)")
    on_delete("OLD.user_id = 14", "UPDATE totals SET number = number - 1")
    set_in_session(database, "lock_timeout = '200ms'")

    with locked("UPDATE totals SET number = number"):
        result = run_sweep(SMALL)
    again = run_sweep(SMALL)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 29, 1)
    assert (again.outcome, again.counts["deleted_rows"], _left()) == ("done", 1, [])


@pytest.mark.parametrize("code", ["P0001", "42501"])
def test_statement_that_fails_for_each_batch_is_prepared_once(
    add_statuses: AddStatuses, on_delete: OnDelete, code: str
) -> None:
    add_statuses(60, DUE)
    on_delete("OLD.user_id % 10 = 5", f"RAISE EXCEPTION 'kept' USING ERRCODE = '{code}'")

    result = run_sweep(SMALL)

    # A connection keeps what it has prepared, also if the transaction is undone.
    prepared = [(name,) for names in (database.prepared() or {}).values() for name in names]
    assert (result.counts["failed"], len(prepared)) == (6, 1)
    assert database.execute_sql("SELECT name FROM pg_prepared_statements").fetchall() == prepared


@pytest.mark.slow
def test_table_of_slow_rows_is_processed_in_smaller_batches(add_statuses: AddStatuses, on_delete: OnDelete) -> None:
    add_statuses(60, DUE)
    on_delete("true", "PERFORM pg_sleep(0.05)")
    set_in_session(database, "statement_timeout = '1s'")

    result = run_sweep(changed(sweep, batch=30))

    assert (result.outcome, result.counts["deleted_rows"], _left()) == ("done", 60, [])


def test_run_fails_after_a_few_probes_when_everything_times_out(
    add_statuses: AddStatuses, on_delete: OnDelete, statements: list[str]
) -> None:
    add_statuses(50, DUE)
    on_delete("true", "PERFORM pg_sleep(60)")
    set_in_session(database, "statement_timeout = '300ms'")

    result = run_sweep(SMALL)

    assert (result.outcome, result.counts["deleted_rows"]) == ("failed", 0)
    assert result.reason == "database: canceling statement due to statement timeout"
    sent = [sql for sql in statements if "DELETE" in sql or "EXECUTE" in sql]
    assert len(sent) == 4, "the batch, and three of its rows"


@pytest.mark.slow
def test_next_run_continues_behind_the_batch_that_timed_out(add_statuses: AddStatuses, on_delete: OnDelete) -> None:
    add_statuses(50, DUE)
    on_delete("OLD.user_id <= 10", "PERFORM pg_sleep(60)")
    set_in_session(database, "statement_timeout = '300ms'")

    outcomes = [run_sweep(SMALL).outcome for _ in range(2)]
    on_delete("true", "PERFORM 1")
    last = run_sweep(SMALL)

    # The second run deletes all other rows, then the bad batch fails again.
    assert outcomes == ["failed", "failed"]
    assert (last.outcome, last.counts["deleted_rows"], _left()) == ("done", 10, [])


def test_throttled_run_that_left_a_stage_fails_with_the_error_of_its_rows(
    add_statuses: AddStatuses,
    on_delete: OnDelete,
    clock: ManualClock,
    last_run: Callable[[], Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "MOST_FAILURES", 20)
    add_statuses(1000, DUE)
    on_delete("OLD.user_id <= 100", "RAISE EXCEPTION 'not today'")

    def part(name: str, condition: Any) -> TableStage:
        stale = UserStatus.scheduled_for_cleanup
        return TableStage(
            name=name,
            stale=lambda now: stale(now) & condition,
            order=stage_of(sweep).order,
            action=Delete(),
            batch_size=10,
        )

    two_stages = Sweep(
        "shop.two_stages",
        lambda _: [part("bad", UserStatus.user_id <= 100), part("good", UserStatus.user_id > 100)],
        limits=Limits(
            runtime=timedelta(minutes=10),
            batch_takes=None,
            throttle=Throttle(replication_lag_s=None, waiting_locks=None, custom=lambda: "checkout is slow"),
        ),
        guard=Guard(first_run=False),
    )

    result = run_sweep(two_stages, clock=clock, stopping=Impatient(clock))

    assert 0 < result.counts["deleted_rows"] < 900, "throttled in the second stage"
    assert (result.outcome, last_run().cursor["pass"]) == ("failed", "bad")
    assert last_run().reason == "20 rows in a row failed, the last one with: not today"


@pytest.mark.slow
def test_batch_that_takes_too_long_is_left_to_the_next_run(
    add_statuses: AddStatuses, on_delete: OnDelete, monkeypatch: pytest.MonkeyPatch, last_run: Callable[[], Run]
) -> None:
    add_statuses(40, DUE)
    on_delete("OLD.user_id IN (2, 4, 7)", "PERFORM pg_sleep(60)")
    set_in_session(database, "statement_timeout = '300ms'")
    monkeypatch.setattr(bad_rows, "BISECTION_S", 0.5)

    result = run_sweep(SMALL)

    assert [user_id for user_id in _left() if user_id > 10] == [], "the batches behind it"
    assert (result.outcome, result.counts["out_of_time"]) == ("failed", False)
    assert last_run().reason == "database: canceling statement due to statement timeout"
    assert last_run().cursor is None, "the next run begins with the rows that were not tried"


def test_shutdown_during_a_bisection_ends_the_run_before_the_batch(
    add_statuses: AddStatuses, on_delete: OnDelete, last_run: Callable[[], Run]
) -> None:
    add_statuses(20, DUE)
    on_delete("OLD.user_id = 4", "RAISE EXCEPTION 'not this one'")
    stopping = threading.Event()
    stopped = run_sweep(SMALL, stopping=stopping, on_batch=lambda counts: stopping.set())
    resumed = run_sweep(SMALL)

    assert (stopped.outcome, stopped.reason) == ("partial", "shutdown")
    assert (resumed.outcome, resumed.counts["failed"], _left()) == ("done", 1, [4])
    assert stopped.counts["deleted_rows"] + resumed.counts["deleted_rows"] == 19
