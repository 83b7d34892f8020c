"""Dedicated servers for the cost tests, so that no other test's work is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.conftest import Urls
from tests.integration.costs.measuring import CountedCursor
from tests.internals.database import Database
from tests.internals.embedded import embedded
from tests.internals.ledger import schema


@pytest.fixture(scope="session")
def urls() -> Iterator[Urls]:
    """Return dedicated servers, whatever the environment names.

    They write no full-page images, whose number depends on when the last checkpoint was.
    """
    with embedded.start() as servers:
        yield Urls(servers.database_url, servers.redis_url)


@pytest.fixture
def counted(postgres: Database, admin: Connection, settings: Settings) -> Database:
    """Yield a database handle that counts its statements, on a server with no other load."""
    postgres.close()
    parameters: Any = postgres.connect_params
    parameters["cursor_factory"] = CountedCursor
    with admin.cursor() as cursor:
        cursor.execute("SHOW full_page_writes")
        assert cursor.fetchone() == ("off",)
        # A vacuum would write, and use a transaction.
        cursor.execute("ALTER SYSTEM SET autovacuum = off")
        cursor.execute("SELECT pg_reload_conf()")
        # The first row of an index costs more than the next one, and the tables may be those of the test before.
        tables = (f"{settings.schema_name}.{each._meta.table_name}" for each in schema.MODELS)
        cursor.execute(f"TRUNCATE {', '.join(tables)}")
    return postgres


@pytest.fixture
def meter_client(redis_client: redis.Redis, urls: Urls) -> Iterator[redis.Redis]:
    """Return a connection made before the count starts, to the emptied server that is measured."""
    client = redis.Redis.from_url(urls.redis)
    client.flushall()
    redis_client.ping()
    yield client
    client.flushall()
    client.close()
