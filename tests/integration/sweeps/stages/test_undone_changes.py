"""A change that a trigger undoes without an error is a failure of its row, not a change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from blinker import NamedSignal
from peewee import Expression
from psycopg2.extensions import connection as Connection

from housekeeping import Call, Delete, Event, Limits, Rows, Sweep, Transition
from housekeeping.testing.stubs import ManualClock
from tests.integration.conftest import Plant
from tests.integration.sweeps.orders import Order, Status, add, expired, machine, stuck
from tests.internals.core import RowNotChanged
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.sweeps import Batch, RowLog, TableStage, Write

UNDO = ("UPDATE ON orders", "OLD.id IN (2, 9)", "NEW.status := OLD.status")


class Expire(Transition):
    """The same change as a custom action."""

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        update: Any = Order.update(status=Status.EXPIRED, reference="gone").where(chosen).returning(Order.id)
        return Write([update.cte("moved")], self.counted_as)


@pytest.fixture
def orders(postgres: Database) -> None:
    postgres.create_tables([Order])
    add(12)


@contextmanager
def heard_of(signal: Any) -> Iterator[list[int]]:
    """The ids of the rows in the events that are sent within the block."""
    ids: list[int] = []

    def hear(sender: object, rows: Any, **context: Any) -> None:
        ids.extend(row["id"] for row in rows)

    with signal.connected_to(hear):
        yield ids


def _sweep(action: Any, **given: Any) -> Sweep:
    rows = Rows(Order, stale=stuck, order="updated_at", action=action, **given)
    return Sweep("shop.stuck", rows, limits=Limits(batch=5, batch_takes=None))


@pytest.mark.parametrize(
    "action",
    [Transition(machine, "expire"), Expire(machine, "expire"), Call(id, then=Transition(machine, "expire"))],
)
def test_row_whose_change_is_undone_fails_alone(
    orders: None, plant: Plant, reported: list[dict[str, Any]], action: Any
) -> None:
    plant(*UNDO)

    first, second = (run_sweep(_sweep(action), clock=ManualClock()) for _ in range(2))

    assert (first.outcome, first.counts["moved_rows"], first.counts["failed"]) == ("done", 10, 2)
    assert (second.outcome, second.counts["moved_rows"], second.counts["failed"]) == ("done", 0, 2)
    assert expired() == [1, 3, 4, 5, 6, 7, 8, 10, 11, 12]
    assert Order.get_by_id(2).reference == "order 2", "nothing of its change stays"
    assert "a trigger or a rule of its table undoes the change" in str(reported[0]["error"])


def test_undone_change_has_neither_event_nor_log_line(
    orders: None, plant: Plant, caplog: pytest.LogCaptureFixture
) -> None:
    plant(*UNDO)
    caplog.set_level("INFO")
    expired_event = NamedSignal("order_expired")
    log = RowLog("Order expired", {"order_id": "id"})

    with heard_of(expired_event) as ids:
        run_sweep(_sweep(Transition(machine, "expire"), event=Event(expired_event), log=log), clock=ManualClock())

    lines = [vars(each)["order_id"] for each in caplog.records if each.message == "Order expired"]
    assert sorted(ids) == sorted(lines) == expired()


@pytest.mark.parametrize("archive_to", [None, "old_orders"])
def test_row_whose_deletion_is_suppressed_fails_alone(
    orders: None, plant: Plant, admin: Connection, archive_to: str | None
) -> None:
    with admin.cursor() as cursor:
        cursor.execute("CREATE TABLE old_orders (LIKE orders, archived_at timestamptz, archived_by_run bigint)")
    plant("DELETE ON orders", "OLD.id IN (2, 9)", "RETURN NULL")

    first, second = (run_sweep(_sweep(Delete(archive_to=archive_to)), clock=ManualClock()) for _ in range(2))

    assert (first.outcome, first.counts["deleted_rows"], first.counts["failed"]) == ("done", 10, 2)
    assert (second.outcome, second.counts["deleted_rows"], second.counts["failed"]) == ("done", 0, 2)
    assert [order.id for order in Order.select().order_by(Order.id)] == [2, 9]


def test_times_that_a_trigger_sets_are_no_failure(orders: None, plant: Plant) -> None:
    plant("UPDATE ON orders", "true", "NEW.updated_at := '2030-01-01'")
    action = Transition(machine, "expire", changes=lambda now: {Order.updated_at: now})

    result = run_sweep(_sweep(action), clock=ManualClock())

    assert (result.outcome, result.counts["moved_rows"], "failed" in result.counts) == ("done", 12, False)


def test_event_that_a_trigger_undoes_raises_and_changes_nothing(orders: None, plant: Plant) -> None:
    plant(*UNDO)
    record = Order.get_by_id(2)

    with pytest.raises(RowNotChanged, match="undoes the change"):
        machine.fire(record, "expire", {Order.reference: "gone"})

    assert (record.status, record.reference, Order.get_by_id(2).reference) == (Status.PENDING, "order 2", "order 2")
