"""Delete devices not seen for 90 days. Devices that were never seen count from their registration."""

from __future__ import annotations

from datetime import timedelta

from peewee import BigAutoField

from housekeeping import BaseModel, Delete, Sweep, UtcDateTimeField


class Device(BaseModel):
    id = BigAutoField()
    registered_at = UtcDateTimeField()
    seen_at = UtcDateTimeField(null=True)


forgotten_devices = Sweep(
    name="shop.forgotten_devices",
    stale=lambda limit: (Device.seen_at < limit) | (Device.seen_at.is_null() & (Device.registered_at < limit)),
    stale_after=timedelta(days=90),
    order=(Device.seen_at, Device.id),
    action=Delete(),
    schedule="15 3 * * *",
)
