"""Database connections of worker threads between messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.integration.middleware.applications import close_all, eventually, installed, queued, working
from tests.internals.database import Database, database

BACKEND = "SELECT pg_backend_pid()"


@pytest.fixture
def broker(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    yield installed(settings)
    close_all()


def run_in_one_thread(broker: RedisBroker, *bodies: Any) -> None:
    """Run each function as a message, one after the other, in the same worker thread."""
    position = iter(bodies)

    @dramatiq.actor(broker=broker, max_retries=0)
    def work() -> None:
        next(position)()

    for _ in bodies:
        work.send()
    with working(broker):
        eventually(lambda: not queued(broker))


def one_value(query: str) -> Any:
    return database.execute_sql(query).fetchone()[0]


def leave_peewee_transaction() -> None:
    database.atomic().__enter__()
    database.execute_sql("CREATE TABLE left_behind (id int)")


def leave_transaction_by_hand() -> None:
    database.execute_sql("BEGIN")
    database.execute_sql("CREATE TABLE left_behind (id int)")


@pytest.mark.parametrize("leave", [leave_peewee_transaction, leave_transaction_by_hand])
def test_open_transaction_is_rolled_back_before_the_next_message(broker: RedisBroker, leave: Any) -> None:
    seen: list[Any] = []

    run_in_one_thread(
        broker,
        leave,
        lambda: seen.append((one_value("SELECT to_regclass('left_behind')"), database.in_transaction())),
    )

    assert seen == [(None, False)]


@pytest.mark.direct_only(reason="a pooler keeps the connections to the server")
def test_healthy_connection_is_reused_and_closed_with_its_thread(broker: RedisBroker, admin: Connection) -> None:
    seen: list[Any] = []

    run_in_one_thread(broker, *[lambda: seen.append(one_value(BACKEND))] * 3)

    assert len(set(seen)) == 1
    with admin.cursor() as cursor:
        alive = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
        eventually(lambda: cursor.execute(alive, seen[:1]) or cursor.fetchone() == (0,))
