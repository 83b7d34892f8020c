"""An application's table, its sweep with an event, and what its handlers note."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from peewee import BigAutoField, BigIntegerField, TextField

from housekeeping import BaseModel, Delete, Event, Limits, Rows, Sweep, UtcDateTimeField, events

NOW: Final = datetime(2026, 5, 1, tzinfo=UTC)
orders_expired: Final = events.event("shop.orders_expired")


class Order(BaseModel):
    id = BigAutoField()
    customer = TextField()
    expires_at = UtcDateTimeField()

    class Meta:
        table_name = "orders"


class Notice(BaseModel):
    """Written by a handler within the batch's transaction."""

    order_id = BigIntegerField(primary_key=True)


sweep: Final = Sweep(
    "shop.expired_orders",
    Rows(
        Order,
        stale=lambda row, now: row.expires_at <= now,
        order="expires_at",
        action=Delete(),
        event=Event(orders_expired, "customer", "expires_at", order_id="id"),
    ),
    limits=Limits(batch=4, batch_takes=None),
)


def fill(stale: int = 10) -> None:
    """Add orders that have expired, and one that has not."""
    for n in range(stale):
        Order.create(customer=f"c{n + 1}", expires_at=NOW - timedelta(hours=stale - n))
    Order.create(customer="later", expires_at=NOW + timedelta(hours=1))


def note(connection: Any, rows: list[dict[str, Any]], *, worker: str, run_id: int | None) -> None:
    """Write a notice for each order."""
    with connection.cursor() as cursor:
        for row in rows:
            cursor.execute("INSERT INTO notice (order_id) VALUES (%s)", (row["order_id"],))


def noted() -> list[int]:
    """Return the orders that have a notice."""
    return [notice.order_id for notice in Notice.select().order_by(Notice.order_id)]


def left() -> list[int]:
    """Return the orders that are still there."""
    return [order.id for order in Order.select().order_by(Order.id)]
