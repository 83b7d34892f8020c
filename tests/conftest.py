"""Fixtures every test may use. Servers start with the first test that asks for one.

Given ``HOUSEKEEPING_TEST_DATABASE_URL`` or ``HOUSEKEEPING_TEST_REDIS_URL``, those servers are used,
each test in schemas and under a key prefix of its own; nothing else of them is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import psycopg2
import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import embedded
from housekeeping.foundation.db import Database, connect_to, database
from housekeeping.foundation.redis_client import redis_client as make_redis_client
from housekeeping.foundation.redis_client import shared_redis
from housekeeping.foundation.settings import PREFIX, Settings
from housekeeping.sweeps import schema
from housekeeping.testing import ManualClock
from tests.rabbitmq_server import amqp_url as amqp_url
from tests.twins import running
from tests.twins.running import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.twins.running import pytest_generate_tests as pytest_generate_tests
from tests.twins.running import pytest_pyfunc_call as pytest_pyfunc_call
from tests.twins.running import twin as twin


def pytest_addoption(parser: pytest.Parser) -> None:
    running.add_option(parser)
    parser.addoption("--broker", choices=("redis", "rabbitmq"), default="redis", help="what carries the messages")


@dataclass(frozen=True)
class Urls:
    database: str
    redis: str


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(PREFIX) and not name.startswith((f"{PREFIX}TEST_", f"{PREFIX}EMBEDDED")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def urls() -> Iterator[Urls]:
    """Where PostgreSQL and Redis are; embedded ones unless the environment names others."""
    database_url = os.getenv("HOUSEKEEPING_TEST_DATABASE_URL")
    redis_url = os.getenv("HOUSEKEEPING_TEST_REDIS_URL")
    with ExitStack() as stack:
        if not (database_url and redis_url):
            servers = stack.enter_context(embedded.start(postgres=not database_url, redis=not redis_url))
        yield Urls(database_url or servers.database_url, redis_url or servers.redis_url)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def admin(urls: Urls) -> Iterator[Connection]:
    """A connection of its own, in autocommit, for what a test does behind the library's back."""
    admin = psycopg2.connect(urls.database)
    admin.autocommit = True
    yield admin
    admin.close()


@pytest.fixture
def broker_url(request: pytest.FixtureRequest) -> str | None:
    """RabbitMQ's URL with ``--broker=rabbitmq``; else none, and Redis carries the messages."""
    if request.config.getoption("broker") == "redis":
        return None
    marker = request.node.get_closest_marker("redis_broker_only")
    if marker is not None:
        pytest.skip(marker.kwargs["reason"])
    url: str = request.getfixturevalue("amqp_url")
    return url


@pytest.fixture
def settings(urls: Urls, admin: Connection, broker_url: str | None) -> Iterator[Settings]:
    """Settings of this test's own: two empty schemas (the application's and the library's) and a key prefix."""
    name = f"test_{uuid4().hex[:12]}"
    with admin.cursor() as cursor:
        cursor.execute(f"CREATE SCHEMA {name}")
    separator = "&" if "?" in urls.database else "?"
    yield Settings.load(
        database_url=f"{urls.database}{separator}options=-csearch_path%3D{name}",
        redis_url=urls.redis,
        broker_url=broker_url,
        namespace=name,
        schema_name=f"{name}_own",
    )
    with admin.cursor() as cursor:
        cursor.execute(f"DROP SCHEMA {name} CASCADE")
        cursor.execute(f"DROP SCHEMA IF EXISTS {name}_own CASCADE")


@pytest.fixture
def postgres(settings: Settings, admin: Connection) -> Iterator[Database]:
    """The library's database handle, on this test's schemas, with the library's own tables made."""
    assert settings.database_url is not None
    postgres = connect_to(settings.database_url)
    database.initialize(postgres)
    schema.use_schema(settings.schema_name)
    schema.init()
    with admin.cursor() as cursor:
        cursor.execute(f"SET search_path TO {settings.namespace}")
    yield postgres
    postgres.close()
    database.initialize(None)
    schema.use_schema("housekeeping")


@pytest.fixture
def redis_client(settings: Settings) -> Iterator[redis.Redis]:
    """A client, also the one that leases share; this test's keys are removed afterwards."""
    client = make_redis_client(settings.require_redis_url())
    shared_redis.use(client, settings.namespace)
    yield client
    keys = list(client.scan_iter(match=f"{settings.namespace}:*", count=1000))
    if keys:
        client.delete(*keys)
    client.close()
    shared_redis.client = None


@pytest.fixture
def environment(settings: Settings, redis_client: redis.Redis) -> dict[str, str]:
    """The environment of a real process that is to work on this test's schemas and keys."""
    ours: dict[str, Any] = {
        "DATABASE_URL": settings.database_url,
        "REDIS_URL": settings.redis_url,
        "BROKER_URL": settings.broker_url or "",
        "NAMESPACE": settings.namespace,
        "SCHEMA": settings.schema_name,
        "LOG_FORMAT": "json",
    }
    # Nor the size of a terminal, which tests in parallel are told of though they have none.
    kept = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "COLUMNS", "LINES"))}
    return kept | {f"{PREFIX}{name}": value for name, value in ours.items()}
