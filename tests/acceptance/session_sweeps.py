"""Module of an application with one sweep of its expired sessions."""

from __future__ import annotations

from typing import Final

NAME: Final = "shop.expired_sessions"


def sessions_module(action: str = "Delete()", *, hold: str = "None", table: str = "user_session") -> str:
    """Return the text of the module, whose sweep is called `NAME`."""
    return f"""
from datetime import timedelta
from peewee import SQL, TextField
from housekeeping import BaseModel, Delete, Rows, Sweep, UtcDateTimeField

class UserSession(BaseModel):
    token = TextField(primary_key=True)
    expires_at = UtcDateTimeField()

    class Meta:
        table_name = "{table}"

expired_sessions = Sweep(
    "{NAME}",
    Rows(
        UserSession,
        stale=lambda row, now: row.expires_at <= now,
        hold={hold},
        order="expires_at",
        action={action},
    ),
)
"""
