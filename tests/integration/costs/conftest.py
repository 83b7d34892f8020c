"""Dedicated servers for the cost tests, so that no other test's work is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import embedded
from housekeeping.database.connection import Database
from tests.conftest import Urls
from tests.integration.costs.measuring import CountedCursor


@pytest.fixture(scope="session")
def urls() -> Iterator[Urls]:
    """Always servers of the tests' own, whatever the environment names.

    They write no full-page images, whose number depends on when the last checkpoint was.
    """
    with embedded.start() as servers:
        yield Urls(servers.database_url, servers.redis_url)


@pytest.fixture
def counted(postgres: Database, admin: Connection) -> Database:
    """The library's database handle, whose statements are counted, on a server that does nothing by itself."""
    postgres.close()
    parameters: Any = postgres.connect_params
    parameters["cursor_factory"] = CountedCursor
    with admin.cursor() as cursor:
        cursor.execute("SHOW full_page_writes")
        assert cursor.fetchone() == ("off",)
        # A vacuum in the middle would write, and take a transaction.
        cursor.execute("ALTER SYSTEM SET autovacuum = off")
        cursor.execute("SELECT pg_reload_conf()")
    return postgres


@pytest.fixture
def meter_client(redis_client: redis.Redis, urls: Urls) -> Iterator[redis.Redis]:
    """A connection that is there before anything is counted, and the emptied server of the one measured."""
    client = redis.Redis.from_url(urls.redis)
    client.flushall()
    redis_client.ping()
    yield client
    client.flushall()
    client.close()
