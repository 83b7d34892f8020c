"""A sweep with an effect outside of the database for each row."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from peewee import AutoField
from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, Call, Delete, Rows, Sweep, Transition, UtcDateTimeField
from housekeeping.testing.stubs import ManualClock
from tests.integration.conftest import Locked
from tests.integration.sweeps.orders import HOUR, NOW, Order, Outside, add, expired, machine, stuck, sweep
from tests.integration.sweeps.stages import killed_call
from tests.internals.core import DeclarationError, WorkerSettings
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.insight import dry_run, plan
from tests.internals.ledger import Counts, Run
from tests.internals.sweeps import CallStage, TableStage


@pytest.fixture(autouse=True)
def orders(postgres: Database) -> None:
    postgres.create_tables([Order])


def test_function_is_called_for_each_stale_row_before_its_change(clock: ManualClock) -> None:
    add(7)
    Order.create(id=8, updated_at=NOW - HOUR)
    outside = Outside()

    result = run_sweep(sweep(outside), clock=clock)

    assert (result.outcome, result.reason) == ("done", None)
    assert result.counts == {"moved_rows": 7, "failed": 0, "batches": 2, "out_of_time": False}
    assert outside.asked == expired() == [1, 2, 3, 4, 5, 6, 7]


def test_function_is_called_without_transaction_or_row_lock(
    clock: ManualClock, postgres: Database, admin: Connection
) -> None:
    add(2)
    seen: list[int] = []

    def look(order: Order) -> None:
        assert postgres.connection().info.transaction_status == TRANSACTION_STATUS_IDLE
        with admin.cursor() as cursor:
            cursor.execute("SELECT id FROM orders ORDER BY id FOR UPDATE NOWAIT")
            seen.append(len(cursor.fetchall()))

    result = run_sweep(sweep(look), clock=clock)

    assert (result.counts["failed"], seen) == (0, [2, 2])


def test_row_no_longer_stale_after_its_call_is_not_changed(clock: ManualClock, admin: Connection) -> None:
    add(3)

    def change(order: Order) -> None:
        with admin.cursor() as cursor:
            cursor.execute("UPDATE orders SET updated_at = %s WHERE id = 2 AND %s = 2", (clock.now(), order.id))

    result = run_sweep(sweep(change), clock=clock)

    assert (result.outcome, result.counts["moved_rows"], result.counts["failed"]) == ("done", 2, 0)
    assert expired() == [1, 3]


def test_function_is_not_called_for_a_locked_row(clock: ManualClock, locked: Locked) -> None:
    add(3)
    outside = Outside()

    with locked("SELECT FROM orders WHERE id = 2 FOR UPDATE"):
        run_sweep(sweep(outside), clock=clock)

    assert outside.asked == expired() == [1, 3]


def test_row_locked_when_its_batch_is_written_is_skipped(clock: ManualClock, locked: Locked) -> None:
    add(3)
    held: list[Any] = []

    def hold(order: Order) -> None:
        if order.id == 2:
            held.append(locked("SELECT FROM orders WHERE id = 2 FOR UPDATE"))
            held[0].__enter__()

    result = run_sweep(sweep(hold), clock=clock)
    held[0].__exit__(None, None, None)

    assert (result.outcome, expired()) == ("done", [1, 3])


def test_time_limit_is_checked_between_calls_and_the_next_run_resumes(clock: ManualClock) -> None:
    add(4)
    asked: list[int] = []

    def take_long(order: Order) -> None:
        asked.append(order.id)
        clock.advance(timedelta(seconds=40))

    worker = sweep(take_long, runtime=timedelta(minutes=1))
    first, second = run_sweep(worker, clock=clock), run_sweep(worker, clock=clock)

    assert (first.outcome, first.reason, first.counts["moved_rows"]) == ("partial", "out_of_time", 2)
    assert (second.outcome, second.counts["moved_rows"], asked) == ("done", 2, [1, 2, 3, 4])


def test_resumed_run_retries_a_failed_row_last(
    clock: ManualClock,
) -> None:
    add(6)
    outside, stopping = Outside(1), threading.Event()

    def stop(counts: Counts) -> None:
        stopping.set()

    first = run_sweep(sweep(outside, batch=2), clock=clock, on_batch=stop, stopping=stopping)
    second = run_sweep(sweep(outside, batch=2), clock=clock)

    assert (first.outcome, first.reason, first.counts["moved_rows"]) == ("partial", "shutdown", 2), "heard after a call"
    assert (second.outcome, outside.asked) == ("done", [1, 2, 3, 4, 5, 6, 1])


def test_whole_batch_is_one_call(clock: ManualClock) -> None:
    add(7)
    outside = Outside()

    result = run_sweep(sweep(outside.all, whole_batch=True), clock=clock)

    assert (result.counts["moved_rows"], outside.asked) == (7, [5, 2])


def test_plan_and_dry_run_call_nothing(clock: ManualClock) -> None:
    add(7)
    outside = Outside()

    planned, dry = plan(sweep(outside), clock=clock), dry_run(sweep(outside), clock=clock)

    assert (planned.stale.rows, planned.batches, dry.counts["moved_rows"]) == (7, 2, 7)
    assert (outside.asked, expired(), Run.select().count()) == ([], [], 0)


@pytest.mark.slow
def test_rows_of_a_process_killed_before_the_commit_are_called_again(
    environment: dict[str, str], clock: ManualClock, tmp_path: Path
) -> None:
    # F3
    add(7)
    asked = tmp_path / "asked"
    command = [sys.executable, "-m", killed_call.__name__, str(asked)]

    killed = subprocess.run(command, env=environment, cwd=Path(__file__).parents[4], timeout=60)
    before = expired()
    result = run_sweep(sweep(killed_call.asking(asked)), clock=clock)

    assert (killed.returncode, before) == (-signal.SIGKILL, [1, 2, 3, 4, 5]), "the batch before it stays"
    assert (result.outcome, result.counts["moved_rows"], expired()) == ("done", 2, [1, 2, 3, 4, 5, 6, 7])
    assert asked.read_text().split() == ["1", "2", "3", "4", "5", "6", "7", "6", "7"]


def test_second_run_calls_nothing(clock: ManualClock) -> None:
    # I4
    add(3)
    outside = Outside()

    run_sweep(sweep(outside), clock=clock)
    again = run_sweep(sweep(outside), clock=clock)

    assert (again.outcome, again.counts["moved_rows"], outside.asked) == ("done", 0, [1, 2, 3])


@pytest.mark.parametrize("stale_after_s", [7198, 7199, 7200])
def test_stale_age_is_a_setting(clock: ManualClock, stale_after_s: float) -> None:
    add(2)  # 7199 and 7198 seconds old
    worker = sweep(Outside()).configured(WorkerSettings(stale_after_s=stale_after_s))

    run_sweep(worker, clock=clock)

    assert expired() == {7198: [1], 7199: [], 7200: []}[int(stale_after_s)]


@pytest.mark.parametrize("kind", [TableStage, CallStage])
def test_call_in_a_plain_table_stage_is_rejected(kind: Callable[..., TableStage]) -> None:
    def declare() -> Sweep:
        action = Call(print, then=Transition(machine, "expire"))
        order = (Order.updated_at, Order.id)
        stale = partial(stuck, Order)
        return Sweep("shop.x", lambda sweep: [kind(name="rows", stale=stale, order=order, action=action)])

    if kind is CallStage:
        assert declare().declared_stages()
        return
    with pytest.raises(DeclarationError, match="a Call needs a CallStage"):
        declare()


def test_order_column_may_have_the_longest_name(postgres: Database) -> None:
    name = "x" * 63

    class Parcel(BaseModel):
        id = AutoField()
        due = UtcDateTimeField(column_name=name)

    postgres.create_tables([Parcel])
    Parcel.create(due=NOW)
    called: list[int] = []
    parcels = Sweep(
        "shop.parcels",
        Rows(
            Parcel,
            stale=lambda row, now: row.due < now,
            order="due",
            action=Call(lambda parcel: called.append(parcel.id), then=Delete()),
        ),
    )

    result = run_sweep(parcels)

    assert (result.outcome, called, Parcel.select().count()) == ("done", [1], 0)
