"""Delete expired invitations, whose key is a UUID."""

from __future__ import annotations

from peewee import UUIDField

from housekeeping import BaseModel, Delete, Rows, Sweep, UtcDateTimeField


class Invitation(BaseModel):
    id = UUIDField(primary_key=True)
    expires_at = UtcDateTimeField()


expired_invitations = Sweep(
    "shop.expired_invitations",
    Rows(Invitation, stale=lambda row, now: row.expires_at <= now, order="expires_at", action=Delete()),
    schedule="*/10 * * * *",
)
