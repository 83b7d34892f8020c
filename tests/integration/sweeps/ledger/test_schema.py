from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from housekeeping import Settings
from tests.internals.core import DatabaseUnavailable, SchemaMissing
from tests.internals.database import Database, connect_to, database
from tests.internals.ledger import NOW, Run, migrations, schema


def _drop(postgres: Database, settings: Settings) -> None:
    postgres.execute_sql(f"DROP SCHEMA {settings.schema_name} CASCADE")


def test_init_creates_the_tables_once(postgres: Database, settings: Settings) -> None:
    _drop(postgres, settings)

    steps = [schema.init(), schema.init()]

    assert steps == [len(migrations.MIGRATIONS), 0]
    assert Run.select().count() == 0


def test_init_keeps_existing_rows(postgres: Database) -> None:
    Run.insert(worker="w", trigger="cli", started_at=NOW, heartbeat_at=NOW).execute()

    schema.init()

    assert Run.select().count() == 1


def test_concurrent_inits_create_the_tables_once(postgres: Database, settings: Settings) -> None:
    _drop(postgres, settings)
    together = threading.Barrier(2, timeout=10)

    def init() -> int:
        together.wait()
        try:
            return schema.init()
        finally:
            postgres.close()

    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(init) for _ in range(2))

    assert sorted([first.result(), second.result()]) == [0, len(migrations.MIGRATIONS)]


def test_failed_init_leaves_nothing_behind(postgres: Database, settings: Settings) -> None:
    _drop(postgres, settings)
    # Its name is that of a table which the migration creates after others.
    postgres.execute_sql(f"CREATE SCHEMA {settings.schema_name}; CREATE TABLE {settings.schema_name}.outbox ()")

    with pytest.raises(Exception, match='relation "outbox" already exists'):
        schema.init()

    found = postgres.execute_sql("SELECT tablename FROM pg_tables WHERE schemaname = %s", (settings.schema_name,))
    assert found.fetchall() == [("outbox",)]


def test_newer_release_applies_its_migrations(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, "CREATE TABLE {schema}.further ()"))
    with pytest.raises(SchemaMissing, match=r"is at version \d+, this code needs \d+; run: housekeeping init$"):
        schema.require()

    steps = schema.init()

    assert steps == 1
    schema.require()


def test_missing_tables_error_names_the_command(postgres: Database, settings: Settings) -> None:
    _drop(postgres, settings)

    with pytest.raises(SchemaMissing, match=f"'{settings.schema_name}' is not in this database.*: housekeeping init$"):
        schema.require()


def test_schema_newer_than_the_code_is_accepted(postgres: Database, settings: Settings) -> None:
    postgres.execute_sql(f"INSERT INTO {settings.schema_name}.migrations (version) VALUES (99)")

    schema.require()


def test_unreachable_server_is_not_a_missing_schema() -> None:
    database.initialize(connect_to("postgresql://me:hunter2@localhost:1/db"))

    with pytest.raises(DatabaseUnavailable):
        schema.require()
    database.initialize(None)
