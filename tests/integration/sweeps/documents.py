"""Documents of an application, some of them on legal hold, and a sweep of the old ones."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import pytest
from peewee import BigAutoField, BigIntegerField, BooleanField

from housekeeping import BaseModel, Delete, Guard, Limits, Rows, Sweep, UtcDateTimeField
from tests.integration.sweeps.orders import NOW as NOW
from tests.internals.database import Database


class Document(BaseModel):
    id = BigAutoField()
    user_id = BigIntegerField()
    on_hold = BooleanField(null=True)
    expires_at = UtcDateTimeField()

    class Meta:
        table_name = "documents"


class LegalHold(BaseModel):
    user_id = BigIntegerField(null=True)

    class Meta:
        table_name = "legal_holds"


def held_users(now: Any = None) -> Any:
    return LegalHold.select().where(LegalHold.user_id == Document.user_id)


DOCUMENTS: Final = Sweep(
    "shop.documents",
    Rows(
        Document,
        stale=lambda row, now: row.expires_at <= now,
        order="expires_at",
        hold=lambda row: LegalHold.user_id == row.user_id,
        action=Delete(),
    ),
    limits=Limits(batch=2, batch_takes=None),
    guard=Guard(first_run=False),
)


@pytest.fixture
def documents(postgres: Database) -> None:
    """Documents 1 to 6 of users 1 to 6, all stale but the last. Users 2 and 5 are on hold, in both ways."""
    postgres.create_tables([Document, LegalHold])
    for number in range(1, 7):
        at = NOW - timedelta(hours=6 - number) if number < 6 else NOW + timedelta(hours=1)
        Document.create(user_id=number, on_hold=True if number in (2, 5) else None, expires_at=at)
    LegalHold.insert_many([{"user_id": 2}, {"user_id": 5}, {"user_id": None}]).execute()


def left() -> list[int]:
    return [row.id for row in Document.select().order_by(Document.id)]
