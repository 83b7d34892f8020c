"""Table of the user status cleanup."""

from __future__ import annotations

from datetime import datetime

from peewee import SQL, BigIntegerField, Expression, TextField

from housekeeping import BaseModel, UtcDateTimeField


class UserStatus(BaseModel):
    """Status that a user has set; at most one per user."""

    user_id = BigIntegerField(primary_key=True)
    emoji = TextField(default="speech_balloon", constraints=[SQL("DEFAULT 'speech_balloon'")])
    message = TextField(null=True)
    #: When the status expires; NULL means never.
    clear_status_at = UtcDateTimeField(null=True)

    class Meta:
        table_name = "user_statuses"

    @classmethod
    def scheduled_for_cleanup(cls, now: datetime) -> Expression:
        """Return the predicate for statuses that expire at `now` or earlier; NULL never expires."""
        due: Expression = cls.clear_status_at <= now
        return due


UserStatus.add_index(
    UserStatus.index(
        UserStatus.clear_status_at,
        UserStatus.user_id,
        where=UserStatus.clear_status_at.is_null(False),
        name="index_user_statuses_on_clear_status_at_not_null",
    )
)
