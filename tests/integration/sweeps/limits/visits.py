"""A table of visits, and a sweep of the old ones."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from peewee import BigAutoField, BooleanField

from housekeeping.database.connection import Database, database
from housekeeping.sweeps import BaseModel, Breaker, Delete, Sweep, UtcDateTimeField

NAME = "shop.visits"


class Visit(BaseModel):
    id = BigAutoField()
    at = UtcDateTimeField()
    bot = BooleanField(default=False)


OLD = Sweep(
    name=NAME,
    stale=lambda now: Visit.at < now,
    order=(Visit.at, Visit.id),
    action=Delete(),
    batch_size=10_000,
    breaker=Breaker(times_history=None),
)


@pytest.fixture
def visits(postgres: Database) -> Callable[[int, int], None]:
    """Adds visits: a number of stale ones and a number of others."""
    postgres.create_tables([Visit])

    def add(stale: int, others: int) -> None:
        for number, at in ((stale, "2025-01-01 00:00:00+00"), (others, "2099-01-01 00:00:00+00")):
            database.execute_sql(
                "INSERT INTO visit (at, bot) SELECT %s, false FROM generate_series(1, %s)", (at, number)
            )

    return add


def old(bot: bool, now: datetime) -> Any:
    return (Visit.at < now) & (Visit.bot == bot)
