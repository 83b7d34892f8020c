"""Workers that were given a database or a table, which does not exist there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

import pytest
from peewee import AutoField

from housekeeping import BaseModel, Settings, UtcDateTimeField
from tests.integration.several_databases import CI, entries
from tests.integration.several_databases import two as two
from tests.internals.core import MAIN, WorkerSettings
from tests.internals.database import database
from tests.internals.doctor import examine, needed_rights
from tests.internals.engine import run_sweep
from tests.internals.workers import configured_sweeps

pytestmark = pytest.mark.one_database_only(reason="it configures several databases itself")
STATUSES: Final = "user_status_cleanup.batch"
SHOP: Final = "shop_of_two_databases"


class Visit(BaseModel):
    id = AutoField()
    due_at = UtcDateTimeField()

    class Meta:
        table_name = "visits"


@pytest.fixture
def shop(two: Settings) -> Iterator[Settings]:
    """Settings with a module of two sweeps, of which each works in a database of its own."""
    module = ModuleType(SHOP)
    vars(module)["SWEEPS"] = (entries("shop.entries", MAIN), entries("shop.visits", CI, Visit))
    sys.modules[SHOP] = module
    with database.using(CI):
        database.execute_sql("DROP TABLE entries")
        database.create_tables([Visit])
    yield two.model_copy(update={"sweeps": (SHOP,), "built_in": ()})
    del sys.modules[SHOP]


@pytest.fixture
def own_names() -> Iterator[None]:
    """Give the models their own tables again."""
    yield
    configured_sweeps(Settings.load())


def errors(settings: Settings) -> list[tuple[str, str, str]]:
    found = examine(settings, configured_sweeps(settings))
    return [(each.area, each.subject, each.text) for each in found if each.level == "error"]


@pytest.mark.parametrize("given", [{"database": CI}, {"table": "statuses"}, {"tables": {"user_statuses": "statuses"}}])
def test_given_place_without_the_table_is_an_error(two: Settings, own_names: None, given: dict[str, Any]) -> None:
    settings = two.model_copy(update={"workers": {STATUSES: WorkerSettings(**given)}})

    [(area, subject, text)] = errors(settings)

    assert (area, subject) == (STATUSES, "table user_statuses")
    assert text.endswith("is not in the database 'ci'" if "database" in given else "is not in the database 'main'")
    assert run_sweep(configured_sweeps(settings)[STATUSES]).outcome == "failed"


def test_declared_database_without_the_table_is_an_error(shop: Settings) -> None:
    with database.using(CI):
        database.execute_sql("DROP TABLE visits")

    assert [each[:2] for each in errors(shop)] == [("shop.visits", "table visits")]


def test_sweeps_of_a_module_are_examined_in_their_own_databases(shop: Settings) -> None:
    assert errors(shop) == []
    assert [*needed_rights(shop, {"shop.entries"}), *needed_rights(shop, {"shop.visits"})] == ["entries", "visits"]
