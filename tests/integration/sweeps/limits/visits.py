"""A table of visits, and a sweep of the old ones."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from peewee import BigAutoField, BooleanField

from housekeeping import BaseModel, Delete, Guard, Limits, Rows, Sweep, UtcDateTimeField
from tests.internals.database import Database, database

NAME = "shop.visits"


class Visit(BaseModel):
    id = BigAutoField()
    at = UtcDateTimeField()
    bot = BooleanField(default=False)


OLD = Sweep(
    NAME,
    Rows(Visit, stale=lambda row, now: row.at < now, order="at", action=Delete()),
    limits=Limits(batch=10_000),
    guard=Guard(times_history=None),
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


def old(bot: bool, row: Any, now: datetime) -> Any:
    return (row.at < now) & (row.bot == bot)
