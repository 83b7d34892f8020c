"""A row for which another session is inserting a dependent row: it can be changed, but not deleted."""

from __future__ import annotations

from typing import Any

import pytest
from peewee import Expression

from housekeeping import Call, Delete, Rows, Sweep, Transition
from housekeeping.testing.stubs import ManualClock
from tests.integration.conftest import Locked
from tests.integration.sweeps.orders import Order, Status, add, expired, machine, stuck
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.sweeps import Batch, TableStage, Write

#: Takes the lock FOR KEY SHARE on order 2.
CHILD = "INSERT INTO note (order_id) VALUES (2)"


class Expire(Transition):
    """The same change as a custom action."""

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        update: Any = Order.update(status=Status.EXPIRED).where(chosen).returning(Order.id)
        return Write([update.cte("moved")], self.counted_as)


class Renumber(Transition):
    """Changes the key of its rows."""

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        update: Any = Order.update({Order.id: Order.id + 1000, Order.status: Status.EXPIRED}).where(chosen)
        return Write([update.returning(Order.id).cte("moved")], self.counted_as)


@pytest.fixture
def orders(postgres: Database) -> None:
    postgres.create_tables([Order])
    add(3)
    postgres.execute_sql("CREATE TABLE note (order_id bigint REFERENCES orders (id))")


def _sweep(action: Any) -> Sweep:
    return Sweep("shop.stuck", Rows(Order, stale=stuck, order="updated_at", action=action))


@pytest.mark.parametrize(
    "action",
    [Transition(machine, "expire"), Expire(machine, "expire"), Call(id, then=Transition(machine, "expire"))],
)
def test_change_that_keeps_the_key_does_not_skip_the_row(orders: None, locked: Locked, action: Any) -> None:
    with locked(CHILD):
        result = run_sweep(_sweep(action), clock=ManualClock())

    assert (result.outcome, result.counts["moved_rows"], expired()) == ("done", 3, [1, 2, 3])


@pytest.mark.parametrize(("action", "count"), [(Delete(), "deleted_rows"), (Renumber(machine, "expire"), "moved_rows")])
def test_deletion_or_change_of_the_key_skips_the_row(orders: None, locked: Locked, action: Any, count: str) -> None:
    with locked(CHILD):
        result = run_sweep(_sweep(action), clock=ManualClock())

    assert (result.outcome, result.counts[count]) == ("done", 2)
    assert Order.get_by_id(2).status == Status.PENDING
