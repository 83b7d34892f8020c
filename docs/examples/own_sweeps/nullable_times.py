"""Delete devices not seen for 90 days. Devices that were never seen count from their registration."""

from __future__ import annotations

from datetime import timedelta

from peewee import BigAutoField

from housekeeping import BaseModel, Delete, Rows, Sweep, UtcDateTimeField


class Device(BaseModel):
    id = BigAutoField()
    registered_at = UtcDateTimeField()
    seen_at = UtcDateTimeField(null=True)


forgotten_devices = Sweep(
    "shop.forgotten_devices",
    Rows(
        Device,
        stale=lambda row, limit: (row.seen_at < limit) | (row.seen_at.is_null() & (row.registered_at < limit)),
        order="seen_at",
        age=timedelta(days=90),
        action=Delete(),
    ),
    schedule="15 3 * * *",
)
