"""The kit's fixtures for a sweep with a database of its own."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from peewee import AutoField

from housekeeping import BaseModel, Delete, Rows, Settings, Sweep, UtcDateTimeField
from tests.internals.database import Database, database
from tests.internals.engine import run_sweep

pytestmark = pytest.mark.one_database_only(reason="it configures several databases itself")


class Draft(BaseModel):
    id = AutoField()
    due_at = UtcDateTimeField()


drafts = Sweep(
    "shop.drafts", Rows(Draft, stale=lambda row, now: row.due_at < now, order="due_at", action=Delete()), database="ci"
)


@pytest.fixture
def housekeeping_settings(housekeeping_settings: Settings) -> Settings:
    url = housekeeping_settings.require_database_url()
    return housekeeping_settings.model_copy(update={"databases": {"ci": url}})


def test_sweep_of_another_database_runs_in_a_test(housekeeping_database: Database) -> None:
    housekeeping_database.create_tables([Draft])
    Draft.create(due_at=datetime(2020, 1, 1, tzinfo=UTC))

    assert run_sweep(drafts).counts["deleted_rows"] == 1
    assert set(database.by_name()) == {"main", "ci"}
