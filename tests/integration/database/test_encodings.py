"""Databases whose texts are not in UTF-8."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from peewee import DataError

from housekeeping import Delete, Guard, Limits, Rows, Settings, Sweep
from tests.conftest import Urls
from tests.internals.database import Database, database
from tests.internals.engine import run_sweep
from tests.internals.ledger import Rejection, Run
from tests.two_databases import OtherDatabase

LATIN: Sweep = Sweep(
    "shop.names",
    Rows("names", stale=lambda row: row.name != "caf\xe9", action=Delete()),
    limits=Limits(batch=5, batch_takes=None),
    guard=Guard(first_run=False),
    database="latin",
)


@pytest.fixture
def latin1(postgres: Database, urls: Urls, settings: Settings) -> Iterator[None]:
    """A database in LATIN1 is the current one."""
    other = OtherDatabase(urls.database, "LATIN1")
    with other.used_as("latin", settings), database.using("latin"):
        database.execute_sql(f"CREATE SCHEMA {settings.namespace}")
        database.execute_sql("CREATE TABLE names (name text PRIMARY KEY)")
        database.execute_sql("INSERT INTO names VALUES ('caf\xe9'), ('th\xe9'), ('\xfcber'), ('nach'), ('von')")
        yield
    other.drop()


def test_texts_of_another_encoding_are_compared_and_recorded(latin1: None) -> None:
    database.execute_sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION '%% stays, %%', OLD.name, repeat('x', 3000); END $$;"
        "CREATE TRIGGER refuse BEFORE DELETE ON names FOR EACH ROW WHEN (OLD.name = 'th\xe9') EXECUTE FUNCTION refuse()"
    )

    result = run_sweep(LATIN)

    left = [name for (name,) in database.execute_sql("SELECT name FROM names ORDER BY name")]
    assert (result.outcome, result.counts["failed"], left) == ("done", 1, ["caf\xe9", "th\xe9"])
    (rejected,) = Rejection.select()
    assert rejected.sample["record"] == {"name": "th\xe9"}


def test_text_that_the_encoding_lacks_is_an_error_of_the_statement(latin1: None) -> None:
    with pytest.raises(DataError, match="no equivalent in encoding"):
        database.execute_sql("SELECT 1 FROM names WHERE name = %s", ("\u2026",))


def test_failed_run_with_a_long_error_is_recorded(latin1: None) -> None:
    database.execute_sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION 'no rows today, %%', repeat('x', 20000) USING ERRCODE = 'serialization_failure'; END $$;"
        "CREATE TRIGGER refuse BEFORE DELETE ON names EXECUTE FUNCTION refuse()"
    )

    result = run_sweep(LATIN)

    assert (result.outcome, Run.get().outcome) == ("failed", "failed")
