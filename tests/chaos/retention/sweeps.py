"""Sweeps of an application with an archive and with partitions (``HOUSEKEEPING_SWEEPS``)."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from peewee import BigIntegerField, BooleanField, CompositeKey, TextField

from housekeeping import BaseModel, Delete, DropPartitions, Sweep, UtcDateTimeField
from housekeeping.sweeps.lease_config import LeaseConfig


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
    name="shop.expired_sessions",
    stale=lambda now: Session.expires_at <= now,
    order=(Session.expires_at, Session.id),
    action=Delete(archive_to="old_sessions"),
    lease=LeaseConfig("shop.expired_sessions", timedelta(minutes=10)),
    confirm_first_run=False,
)
old_events: Final = Sweep(
    name="shop.old_events",
    hold=lambda: Event.on_hold,
    order=(Event.happened_at,),
    action=DropPartitions(older_than=timedelta(days=365), lock_timeout=timedelta(seconds=0.5)),
    lease=LeaseConfig("shop.old_events", timedelta(minutes=10)),
)
