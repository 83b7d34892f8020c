"""A database beside main, and a table of entries in both."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from peewee import AutoField

from housekeeping import BaseModel, Delete, Rows, Settings, Sweep, UtcDateTimeField
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.internals.core import MAIN
from tests.internals.database import Database, bind, database
from tests.two_databases import OtherDatabase

CI: Final = "ci"


class Entry(BaseModel):
    id = AutoField()
    due_at = UtcDateTimeField()

    class Meta:
        table_name = "entries"


def entries(name: str, database: str, model: type[Any] = Entry) -> Sweep:
    return Sweep(
        name,
        Rows(model, stale=lambda row, now: row.due_at < now, action=Delete()),
        schedule="* * * * *",
        database=database,
    )


@pytest.fixture
def two(postgres: Database, settings: Settings, other_database: OtherDatabase) -> Iterator[Settings]:
    """Settings with the databases main and ci, both with the library's tables and a table of entries."""
    with other_database.used_as(CI, settings):
        for name in (MAIN, CI):
            with database.using(name):
                database.execute_sql(f"CREATE SCHEMA IF NOT EXISTS {settings.namespace}")
                database.create_tables([Entry])
        yield settings.model_copy(update={"databases": {CI: other_database.url_of(settings)}})
        with database.using(CI):
            database.execute_sql(f"DROP SCHEMA {settings.namespace} CASCADE")
        for model in (Entry, UserStatus):
            bind(model, database)


def add_entry(name: str) -> None:
    with database.using(name):
        Entry.insert(due_at=datetime(2020, 1, 1, tzinfo=UTC)).execute()


def rows(name: str, query: str) -> list[Any]:
    found = database.by_name()[name].execute_sql(query).fetchall()
    return [row[0] for row in found]


def ledger(name: str, settings: Settings) -> list[Any]:
    return rows(name, f"SELECT worker FROM {settings.schema_name}.runs ORDER BY id")
