"""An application's own table, and sweeps of its own over it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from peewee import AutoField, TextField

from housekeeping import BaseModel, Call, Limits, Rows, StateMachine, Sweep, Transition, UtcDateTimeField
from tests.declarations import changed

NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)
HOUR: Final = timedelta(hours=1)


class Status(StrEnum):
    PENDING = "pending"
    EXPIRED = "expired"


class Order(BaseModel):
    id = AutoField()
    status = TextField(default=Status.PENDING)
    reference = TextField(default="")
    updated_at = UtcDateTimeField()

    class Meta:
        table_name = "orders"


machine: Final = StateMachine(Order.status, Status, {"expire": ([Status.PENDING], Status.EXPIRED)})


class Outside:
    """The other side: what was asked of it, and which orders it refuses."""

    def __init__(self, *refused: int, error: Exception | None = None) -> None:
        self.asked: list[int] = []
        self._refused = refused
        self._error = error or ValueError("no such order")

    def __call__(self, order: Order) -> None:
        self.asked.append(order.id)
        if order.id in self._refused:
            raise self._error

    def all(self, orders: list[Order]) -> None:
        self.asked.append(len(orders))
        if any(order.id in self._refused for order in orders):
            raise self._error


def stuck(row: Any, now: datetime) -> Any:
    """Condition of pending orders that have not changed since this time."""
    return (row.status == Status.PENDING) & (row.updated_at < now)


def sweep(function: Callable[[Any], object], **given: Any) -> Sweep:
    """Return a sweep that calls the function and expires stuck orders; `given` has fields of the call or the sweep."""
    of_call = {name: given.pop(name) for name in ("whole_batch", "unavailable_errors") if name in given}
    rows = Rows(
        Order,
        stale=stuck,
        order="updated_at",
        age=HOUR,
        action=Call(function, then=Transition(machine, "expire"), **of_call),
    )
    return changed(Sweep("shop.stuck_orders", rows, limits=Limits(batch=5, batch_takes=None)), **given)


def add(count: int) -> None:
    """Orders 1, 2, 3, ..., the oldest first, all stuck."""
    for number in range(1, count + 1):
        Order.create(id=number, reference=f"order {number}", updated_at=NOW - 2 * HOUR + number * timedelta(seconds=1))


def expired() -> list[int]:
    """Which orders are."""
    return [order.id for order in Order.select().where(Order.status == Status.EXPIRED).order_by(Order.id)]
