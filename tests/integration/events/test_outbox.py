"""Rows of events that are delivered at least once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from peewee import SQL

from housekeeping import Settings, events
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.events.conftest import On
from tests.integration.events.orders import NOW, Order, left, orders_expired, sweep
from tests.internals.core import DeclarationError
from tests.internals.database import database
from tests.internals.doctor import servers
from tests.internals.engine import run_sweep
from tests.internals.ledger import NOW as DATABASE_NOW
from tests.internals.ledger import OutboxRow, outbox
from tests.internals.workers import outbox_sweep

ALL = list(range(1, 11))
#: The outbox sweep with batches that leave rows to the next one.
SMALL = changed(outbox_sweep, batch=5)


class Handler:
    """Handler that records its rows. It raises for some customers, and for all while it is unavailable."""

    def __init__(self, *refused: str) -> None:
        self.refused = set(refused)
        self.away = False
        self.calls: list[list[dict[str, Any]]] = []

    def __call__(self, rows: list[dict[str, Any]], /, *, worker: str, run_id: int | None) -> None:
        assert not database.in_transaction()
        self.calls.append(rows)
        if self.away or self.refused & {row["customer"] for row in rows}:
            raise OSError("the mail server refuses")

    @property
    def taken(self) -> list[int]:
        calls = [] if self.away else self.calls
        good = [rows for rows in calls if not self.refused & {row["customer"] for row in rows}]
        return [row["order_id"] for rows in good for row in rows]


def expire_orders() -> Any:
    return run_sweep(sweep, clock=ManualClock(NOW))


def sweep_outbox() -> Any:
    """Deliver everything, as if an hour and a half had passed."""
    OutboxRow.update(due_at=DATABASE_NOW - timedelta(seconds=1)).execute()
    return run_sweep(outbox_sweep)


def run_without_time(what: Any) -> None:
    """Run the sweep; its time is up after the first call."""
    run_sweep(what, clock=ManualClock(NOW, tick=timedelta(minutes=1)))


def run_two_hours_later(what: Any) -> None:
    """Run the sweep after all delays have passed; its time is up after the first call."""
    OutboxRow.update(due_at=SQL("due_at - interval '2 hours'")).execute()
    run_without_time(what)


def test_rows_are_delivered_after_the_commit_and_removed(orders: type[Order], on: On) -> None:
    handler = Handler()
    on(orders_expired, handler, outbox="mails")

    result = expire_orders()

    assert [len(rows) for rows in handler.calls] == [4, 4, 2]
    assert (result.counts["deleted_rows"], handler.taken, OutboxRow.select().count()) == (10, ALL, 0)
    first = handler.calls[0][0]
    assert (first["customer"], first["expires_at"]) == ("c1", "2026-04-30T14:00:00+00:00")
    assert len({row["delivery_id"] for rows in handler.calls for row in rows}) == 10


def test_failed_delivery_waits_for_the_sweep_and_the_run_continues(
    orders: type[Order], on: On, reported: list[dict[str, Any]]
) -> None:
    handler = Handler()
    handler.away = True
    on(orders_expired, handler, outbox="mails")

    result = expire_orders()
    waiting = OutboxRow.select().count()
    handler.away = False
    handler.calls.clear()
    swept = sweep_outbox()

    assert (result.outcome, result.counts["deleted_rows"], left()) == ("done", 10, [11])
    assert (waiting, len(reported)) == (10, 1), "one call failed; the run left the others to the sweep"
    assert (handler.taken, OutboxRow.select().count()) == (ALL, 0)
    assert (swept.outcome, swept.counts["delivered_rows"]) == ("done", 10)


def test_failing_delivery_is_reported_once_an_hour(orders: type[Order], on: On, reported: list[dict[str, Any]]) -> None:
    handler = Handler()
    handler.away = True
    on(orders_expired, handler, outbox="mails")

    expire_orders()
    orders.create(customer="new", expires_at=NOW)
    expire_orders()

    (about,) = reported
    assert (about["subscription"], about["cause"]) == ("mails", "OSError: the mail server refuses")
    assert len(handler.calls) == 2


def test_failed_row_waits_alone_and_longer_each_time(orders: type[Order], on: On) -> None:
    handler = Handler("c3")
    handler.away = True
    on(orders_expired, handler, outbox="mails")
    expire_orders()
    handler.away = False
    handler.calls.clear()

    delays = []
    for attempts in range(2, 12):
        result = sweep_outbox()
        row: Any = OutboxRow.select(OutboxRow, (OutboxRow.due_at - DATABASE_NOW).alias("delay")).get()
        delays.append(row.delay.total_seconds() / 60)
        assert (row.attempts, row.error) == (attempts, "the mail server refuses")

    assert sorted(handler.taken) == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert (result.outcome, result.counts["failed"]) == ("done", 1)
    least = [min(2 ** (attempts - 1), 60) for attempts in range(2, 12)]
    assert all(low * 0.98 < delay < low * 1.51 for low, delay in zip(least, delays, strict=True))


def test_delivery_id_stays_the_same(orders: type[Order], on: On) -> None:
    handler = Handler("c1")
    on(orders_expired, handler, outbox="mails")
    expire_orders()
    sweep_outbox()

    seen = {row["delivery_id"] for rows in handler.calls for row in rows if row["customer"] == "c1"}

    assert len(seen) == 1


def test_each_subscription_has_its_own_rows(orders: type[Order], on: On) -> None:
    mails, pipelines = Handler("c1"), Handler()
    on(orders_expired, mails, outbox="mails")
    on(orders_expired, pipelines, outbox="pipelines")

    expire_orders()
    waiting = {(row.subscription, row.contents["customer"]) for row in OutboxRow.select()}

    assert pipelines.taken == ALL
    assert {name for name, _ in waiting} == {"mails"} and ("mails", "c1") in waiting


def test_rows_that_another_process_delivers_are_left_alone(orders: type[Order], on: On, locked: Any) -> None:
    handler = Handler()
    handler.away = True
    on(orders_expired, handler, outbox="mails")
    expire_orders()
    handler.away = False
    handler.calls.clear()
    OutboxRow.update(due_at=DATABASE_NOW - timedelta(seconds=1)).execute()
    table = f'"{OutboxRow._meta.schema}".outbox'

    with locked(f"SELECT * FROM {table} WHERE contents ->> 'order_id' IN ('1', '2') FOR UPDATE"):
        run_sweep(outbox_sweep)
    run_sweep(outbox_sweep)

    assert [sorted(row["order_id"] for row in rows) for rows in handler.calls] == [[3, 4, 5, 6, 7, 8, 9, 10], [1, 2]]


def test_rows_of_a_failed_batch_are_not_stored(orders: type[Order], on: On) -> None:
    handler = Handler()

    def refuse(connection: Any, rows: list[dict[str, Any]], **about: Any) -> None:
        if any(row["order_id"] == 2 for row in rows):
            raise ValueError("not this one")

    on(orders_expired, refuse, within_transaction=True)
    on(orders_expired, handler, outbox="mails")

    expire_orders()

    assert (sorted(handler.taken), left()) == ([1, 3, 4, 5, 6, 7, 8, 9, 10], [2, 11])


def test_rows_without_a_handler_stay_and_raise_an_alert(
    orders: type[Order], on: On, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Handler()
    handler.away = True
    events.on(orders_expired, handler, outbox="gone")
    expire_orders()
    events.off(orders_expired, handler)
    OutboxRow.update(due_at=DATABASE_NOW - outbox.OVERDUE - timedelta(seconds=1)).execute()

    result = run_sweep(outbox_sweep)
    findings = list(servers.outbox(settings, {outbox_sweep.name: outbox_sweep}))

    assert (result.outcome, result.counts["no_handler"], OutboxRow.select().count()) == ("done", 10, 10)
    assert [vars(record)["alarm"] for record in caplog.records if record.message == "Alert"] == ["most_no_handler"]
    (finding,) = findings
    assert (finding.level, finding.text) == (
        "error",
        "10 rows of shop.orders_expired: no process delivers to the subscription 'gone'",
    )


def test_doctor_names_a_subscription_that_keeps_failing(orders: type[Order], on: On, settings: Settings) -> None:
    examined = {outbox_sweep.name: outbox_sweep}
    (before,) = servers.outbox(settings, examined)
    on(orders_expired, Handler("c1"), outbox="mails")
    expire_orders()
    OutboxRow.update(attempts=5).where(OutboxRow.error.is_null()).execute()
    sweep_outbox()

    (finding,) = servers.outbox(settings, examined)

    assert (before.level, finding.level) == ("fine", "warning")
    assert finding.text == (
        "1 row of shop.orders_expired could not be delivered to 'mails' for 6 times: the mail server refuses"
    )


def test_claimed_rows_are_released_when_time_is_up(orders: type[Order], on: On) -> None:
    handler = Handler("c1")
    on(orders_expired, handler, outbox="mails")
    expire_orders()
    # Rows of different runs are delivered by calls of their own.
    OutboxRow.update(due_at=DATABASE_NOW - timedelta(seconds=1), attempts=1, run_id=OutboxRow.id).execute()
    before = OutboxRow.select().count()

    result = run_sweep(outbox_sweep, clock=ManualClock(NOW, tick=timedelta(minutes=1)))

    assert (result.outcome, result.reason) == ("partial", "out_of_time")
    assert OutboxRow.select().where(OutboxRow.attempts == 1).count() == before - 1


def test_slow_call_with_a_bad_row_does_not_block_the_others(orders: type[Order], on: On) -> None:
    # Each call uses up the time of its run.
    handler = Handler("c3")
    handler.away = True
    on(orders_expired, handler, outbox="mails")
    expire_orders()
    handler.away = False
    handler.calls.clear()

    for _ in range(2):
        run_two_hours_later(outbox_sweep)
    for _ in range(9):
        run_without_time(outbox_sweep)

    assert sorted(handler.taken) == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert [len(rows) for rows in handler.calls if len(rows) > 1] == [10], "it got all rows together once more"


@pytest.mark.slow
def test_slow_subscription_does_not_starve_another(orders: type[Order], on: On) -> None:
    # Each run has time for one call, and the first subscription fails forever.
    slow, other = Handler(), Handler()
    slow.away = other.away = True
    on(orders_expired, slow, outbox="a")
    on(orders_expired, other, outbox="b")
    expire_orders()
    other.away = False
    other.calls.clear()

    for _ in range(80):
        run_two_hours_later(SMALL)

    assert sorted(other.taken) == ALL


def test_second_handler_of_a_subscription_is_rejected(on: On) -> None:
    on(orders_expired, Handler(), outbox="mails")

    with pytest.raises(DeclarationError, match="the subscription 'mails' needs a name and one handler"):
        events.on(orders_expired, Handler(), outbox="mails")


class Mails:
    def send(self, rows: list[dict[str, Any]], /, *, worker: str, run_id: int | None) -> None: ...


def test_method_may_be_a_handler() -> None:
    mails = Mails()
    events.on(orders_expired, mails.send, outbox="mails")
    events.on(orders_expired, mails.send, outbox="mails")

    events.off(orders_expired, mails.send)

    assert not events.handlers_of(orders_expired).outbox


def test_numbers_that_json_lacks_are_stored_as_text(orders: type[Order], on: On) -> None:
    on(orders_expired, Handler(), outbox="mails")

    with database.atomic():
        rows = [{"order_id": 1, "ratio": float("nan"), "limits": [float("-inf"), 1.5]}]
        [stored] = outbox.store_in_outbox(orders_expired, rows, worker="shop.expired_orders", run_id=None)

    assert stored.contents == {"order_id": 1, "ratio": "NaN", "limits": ["-Infinity", 1.5]}
