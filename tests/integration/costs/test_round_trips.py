from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg2
import pytest
import redis

from housekeeping import Settings
from tests.integration.costs.round_trips import RoundTrips, round_trips


@pytest.fixture
def to_postgres(settings: Settings) -> Iterator[RoundTrips]:
    with round_trips(settings.require_database_url()) as counter:
        yield counter


@pytest.fixture
def to_redis(settings: Settings) -> Iterator[RoundTrips]:
    with round_trips(settings.require_redis_url()) as counter:
        yield counter


def _transaction(connection: Any) -> None:
    connection.autocommit = False
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def _statements(connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        cursor.execute("SELECT 2")


def _statements_in_one_string(connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("BEGIN; SELECT 1; COMMIT")


def _large_answer(connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT repeat('x', 1000) FROM generate_series(1, 10000)")


def _large_statement(connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT length(%s)", ("x" * 5_000_000,))


@pytest.mark.parametrize(
    ("do", "expected"),
    [(_transaction, 3), (_statements, 2), (_statements_in_one_string, 1), (_large_answer, 1), (_large_statement, 1)],
)
def test_round_trips_of_a_connection_are_counted(
    to_postgres: RoundTrips, do: Callable[[Any], None], expected: int
) -> None:
    with closing(psycopg2.connect(to_postgres.url)) as connection:
        connection.autocommit = True
        before = to_postgres.count

        do(connection)

        assert to_postgres.count - before == expected


def _pipeline(client: Any) -> None:
    client.pipeline().set("housekeeping:trips", 1, px=1000).get("housekeeping:trips").execute()


def _commands(client: Any) -> None:
    client.get("housekeeping:trips")
    client.get("housekeeping:trips")


def _script(client: Any) -> None:
    client.eval("redis.call('get', KEYS[1]) return redis.call('get', KEYS[1])", 1, "housekeeping:trips")


@pytest.mark.parametrize(("do", "expected"), [(_pipeline, 1), (_commands, 2), (_script, 1)])
def test_round_trips_of_a_redis_client_are_counted(
    to_redis: RoundTrips, do: Callable[[Any], None], expected: int
) -> None:
    with closing(redis.Redis.from_url(to_redis.url)) as client:
        client.ping()
        before = to_redis.count

        do(client)

        assert to_redis.count - before == expected
