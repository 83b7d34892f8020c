"""Delete expired invitations, whose key is a UUID."""

from __future__ import annotations

from peewee import UUIDField

from housekeeping import BaseModel, Delete, Sweep, UtcDateTimeField


class Invitation(BaseModel):
    id = UUIDField(primary_key=True)
    expires_at = UtcDateTimeField()


expired_invitations = Sweep(
    name="shop.expired_invitations",
    stale=lambda now: Invitation.expires_at <= now,
    order=(Invitation.expires_at, Invitation.id),
    action=Delete(),
    schedule="*/10 * * * *",
)
