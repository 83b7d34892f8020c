"""Sweeps of an application with an archive and with partitions (``HOUSEKEEPING_SWEEPS``)."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from peewee import BigIntegerField, BooleanField, CompositeKey, TextField

from housekeeping import (
    BaseModel,
    Delete,
    DropPartitions,
    Guard,
    Lease,
    Rows,
    Sweep,
    UtcDateTimeField,
)


class Session(BaseModel):
    id = BigIntegerField(primary_key=True)
    expires_at = UtcDateTimeField()
    note = TextField()

    class Meta:
        table_name = "sessions"


class Event(BaseModel):
    id = BigIntegerField()
    happened_at = UtcDateTimeField()
    on_hold = BooleanField()

    class Meta:
        table_name = "events"
        primary_key = CompositeKey("id", "happened_at")


expired_sessions: Final = Sweep(
    "shop.expired_sessions",
    Rows(
        Session,
        stale=lambda row, now: row.expires_at <= now,
        order="expires_at",
        action=Delete(archive_to="old_sessions"),
    ),
    lease=Lease("shop.expired_sessions", timedelta(minutes=10)),
    guard=Guard(first_run=False),
)
old_events: Final = Sweep(
    "shop.old_events",
    DropPartitions(
        Event,
        "happened_at",
        older_than=timedelta(days=365),
        lock_timeout=timedelta(seconds=0.5),
        hold=lambda row: row.on_hold,
    ),
    lease=Lease("shop.old_events", timedelta(minutes=10)),
)
