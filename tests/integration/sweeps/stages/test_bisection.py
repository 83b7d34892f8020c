"""Rows that are slow, or wait for a lock, fail alone; a database on which everything times out fails the run."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Delete, Sweep
from housekeeping.database.connection import Database, database
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.limits.declared import ThrottleLimits
from housekeeping.sweeps.stages.table_stage import TableStage
from housekeeping.testing import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from housekeeping.workers.user_status_cleanup.worker import sweep
from tests.integration.conftest import AddStatuses, Locked
from tests.integration.sweeps.engine.executed import SMALL
from tests.integration.sweeps.engine.sizing import DUE, Impatient
from tests.integration.sweeps.orders import Order, Outside, add
from tests.integration.sweeps.orders import sweep as orders_sweep
from tests.session_settings import set_in_session

#: Makes the deletion of the statuses that the SQL condition holds for do this first, in PL/pgSQL.
Plant = Callable[[str, str], None]


@pytest.fixture
def on_delete(statuses: type[UserStatus], admin: Connection) -> Plant:
    def plant(condition: str, body: str) -> None:
        with admin.cursor() as cursor:
            cursor.execute(
                "CREATE OR REPLACE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN IF {condition} THEN {body}; END IF; RETURN OLD; END $$;"
                "DROP TRIGGER IF EXISTS slow ON user_statuses;"
                "CREATE TRIGGER slow BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION slow()"
            )

    return plant


def _left() -> list[int]:
    return [row.user_id for row in UserStatus.select().order_by(UserStatus.user_id)]


@pytest.mark.parametrize("slow", [1, pytest.param(150, marks=pytest.mark.slow), 350])
def test_row_slower_than_the_statement_timeout_fails_alone(
    add_statuses: AddStatuses, on_delete: Plant, reported: list[dict[str, Any]], slow: int
) -> None:
    add_statuses(350, DUE)
    on_delete(f"OLD.user_id = {slow}", "PERFORM pg_sleep(60)")
    set_in_session(database, "statement_timeout = '1s'")

    result = run_sweep(sweep)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 349, 1)
    assert _left() == [slow]


def test_row_whose_trigger_waits_for_a_lock_fails_alone(
    add_statuses: AddStatuses, on_delete: Plant, admin: Connection, locked: Locked
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


@pytest.mark.slow
def test_table_of_slow_rows_is_processed_in_smaller_batches(add_statuses: AddStatuses, on_delete: Plant) -> None:
    add_statuses(60, DUE)
    on_delete("true", "PERFORM pg_sleep(0.05)")
    set_in_session(database, "statement_timeout = '1s'")

    result = run_sweep(dataclasses.replace(sweep, batch_size=30))

    assert (result.outcome, result.counts["deleted_rows"], _left()) == ("done", 60, [])


def test_run_fails_after_three_probes_when_everything_times_out(
    add_statuses: AddStatuses, on_delete: Plant, statements: list[str]
) -> None:
    add_statuses(50, DUE)
    on_delete("true", "PERFORM pg_sleep(60)")
    set_in_session(database, "statement_timeout = '300ms'")

    result = run_sweep(SMALL)

    assert (result.outcome, result.counts["deleted_rows"]) == ("failed", 0)
    assert result.reason == "database: canceling statement due to statement timeout"
    batches = [sql for sql in statements if "DELETE" in sql or "EXECUTE" in sql]
    assert len(batches) == 4, "the batch, and three of its rows"


def test_next_run_continues_behind_the_batch_that_timed_out(add_statuses: AddStatuses, on_delete: Plant) -> None:
    add_statuses(50, DUE)
    on_delete("OLD.user_id <= 10", "PERFORM pg_sleep(60)")
    set_in_session(database, "statement_timeout = '300ms'")

    outcomes = [run_sweep(SMALL).outcome for _ in range(2)]
    on_delete("true", "PERFORM 1")
    last = run_sweep(SMALL)

    # The second run deletes all other rows, then the bad batch fails again.
    assert outcomes == ["failed", "failed"]
    assert (last.outcome, last.counts["deleted_rows"], _left()) == ("done", 10, [])


def test_same_error_on_twenty_rows_ends_the_run_with_one_report(
    add_statuses: AddStatuses, on_delete: Plant, reported: list[dict[str, Any]], last_run: Callable[[], Run]
) -> None:
    add_statuses(100, DUE)
    on_delete("true", "RAISE EXCEPTION 'not today'")

    first, second = run_sweep(sweep), run_sweep(sweep)

    assert (first.outcome, first.counts["failed"], second.counts["failed"]) == ("failed", 20, 20)
    assert last_run().reason == "20 rows in a row failed with the same error: not today"
    assert [about["rows"] for about in reported if "samples" in about] == [20], "one report, none for the second run"


def test_next_run_continues_behind_rows_with_the_same_error(add_statuses: AddStatuses, on_delete: Plant) -> None:
    add_statuses(100, DUE)
    on_delete("OLD.user_id BETWEEN 31 AND 60", "RAISE EXCEPTION 'not today'")

    for _ in range(3):
        run_sweep(sweep)

    assert _left() == list(range(31, 61)), "all others are gone"


def test_throttled_run_that_left_a_stage_fails_with_the_error_of_its_rows(
    add_statuses: AddStatuses, on_delete: Plant, clock: ManualClock, last_run: Callable[[], Run]
) -> None:
    add_statuses(1000, DUE)
    on_delete("OLD.user_id <= 100", "RAISE EXCEPTION 'not today'")

    def part(name: str, condition: Any) -> TableStage:
        stale = UserStatus.scheduled_for_cleanup
        return TableStage(
            name=name,
            stale=lambda now: stale(now) & condition,
            order=sweep.order,
            action=Delete(),
            batch_size=10,
        )

    two_stages = Sweep(
        name="shop.two_stages",
        stages=lambda _: [part("bad", UserStatus.user_id <= 100), part("good", UserStatus.user_id > 100)],
        counts=("deleted_rows", "batches"),
        progress_counts=("deleted_rows",),
        max_runtime=timedelta(minutes=10),
        throttle=ThrottleLimits(replication_lag_s=None, waiting_locks=None, custom=lambda: "checkout is slow"),
        confirm_first_run=False,
    )

    result = run_sweep(two_stages, clock=clock, stopping=Impatient(clock))

    assert 0 < result.counts["deleted_rows"] < 900, "throttled in the second stage"
    assert (result.outcome, last_run().cursor["pass"]) == ("failed", "bad")
    assert last_run().reason == "20 rows in a row failed with the same error: not today"


def test_row_that_a_trigger_keeps_without_an_error_is_counted_as_failed(
    add_statuses: AddStatuses, on_delete: Plant
) -> None:
    add_statuses(20, DUE)
    on_delete("OLD.user_id IN (3, 4)", "RETURN NULL")

    result = run_sweep(SMALL)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 18, 2)
    assert _left() == [3, 4]


def test_shutdown_during_a_bisection_ends_the_run_before_the_batch(
    add_statuses: AddStatuses, on_delete: Plant, last_run: Callable[[], Run]
) -> None:
    add_statuses(20, DUE)
    on_delete("OLD.user_id = 4", "RAISE EXCEPTION 'not this one'")
    stopping = threading.Event()
    stopped = run_sweep(SMALL, stopping=stopping, on_batch=lambda counts: stopping.set())
    resumed = run_sweep(SMALL)

    assert (stopped.outcome, stopped.reason) == ("partial", "shutdown")
    assert (resumed.outcome, resumed.counts["failed"], _left()) == ("done", 1, [4])
    assert stopped.counts["deleted_rows"] + resumed.counts["deleted_rows"] == 19


@pytest.mark.slow
def test_row_too_slow_to_change_after_its_call_fails_alone(postgres: Database, admin: Connection) -> None:
    postgres.create_tables([Order])
    add(12)
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN IF OLD.id = 3 THEN PERFORM pg_sleep(60); END IF; RETURN NEW; END $$;"
            "CREATE TRIGGER slow BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION slow()"
        )
    set_in_session(database, "statement_timeout = '1s'")
    outside = Outside()

    result = run_sweep(orders_sweep(outside, batch_size=6), clock=ManualClock())

    assert (result.outcome, result.counts["moved_rows"], result.counts["failed"]) == ("done", 11, 1)
    assert outside.asked == list(range(1, 13)), "each was called for once"
