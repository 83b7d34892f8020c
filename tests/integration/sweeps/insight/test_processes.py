"""Heartbeats in real servers: who is alive, by the servers' clocks, and what cannot be read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping.core.redis.client import redis_client as client_for
from housekeeping.core.settings import Settings
from housekeeping.database.connection import Database, database
from housekeeping.sweeps.ledger.models import ProcessRow
from housekeeping.sweeps.processes import heartbeats
from housekeeping.sweeps.processes.heartbeats import SILENCE, Heartbeat, Process, RedisHeartbeats, read_processes

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def heartbeat(**changes: Any) -> Heartbeat:
    said: dict[str, Any] = {"kind": "worker", "host": "a", "pid": 7, "queues": ["q"], "threads": 8, "busy": 3}
    return Heartbeat(**{**said, "version": "1", "up_s": 60.0, **changes})


@pytest.fixture
def store(redis_client: redis.Redis, settings: Settings) -> RedisHeartbeats:
    return RedisHeartbeats(redis_client, settings.namespace)


def age_in_redis(client: redis.Redis, settings: Settings, process_id: str, seconds: float) -> None:
    client.zincrby(f"{settings.namespace}:process_heartbeats", -seconds, process_id)


def age_in_database(admin: Connection, settings: Settings, process_id: str, seconds: float) -> None:
    with admin.cursor() as cursor:
        cursor.execute(
            f"UPDATE {settings.schema_name}.processes SET heartbeat_at = heartbeat_at - %s * interval '1 second' "
            "WHERE id = %s",
            (seconds, process_id),
        )


def read(client: redis.Redis | None, settings: Settings) -> list[Process]:
    return list(read_processes(client, settings.namespace, NOW).every)


def test_process_in_both_stores_is_read_once_by_its_newer_heartbeat(
    store: RedisHeartbeats, redis_client: redis.Redis, settings: Settings, postgres: Database, admin: Connection
) -> None:
    for process_id in ("one", "other"):
        store.write(process_id, heartbeat(busy=1))
        heartbeats.write_row(process_id, heartbeat(busy=2))
    age_in_redis(redis_client, settings, "one", 100)
    age_in_database(admin, settings, "other", 100)

    found = read(redis_client, settings)

    assert sorted((each.heartbeat.busy, each.alive) for each in found) == [(1, True), (2, True)]
    assert [abs(each.started_at - (NOW - timedelta(seconds=60))) < timedelta(seconds=20) for each in found] == [
        True
    ] * 2


@pytest.mark.parametrize(("beyond_s", "alive"), [(-5, True), (1, False)])
def test_process_is_dead_after_three_missed_heartbeats(
    store: RedisHeartbeats,
    redis_client: redis.Redis,
    settings: Settings,
    postgres: Database,
    admin: Connection,
    beyond_s: float,
    alive: bool,
) -> None:
    store.write("redis", heartbeat())
    heartbeats.write_row("database", heartbeat())
    age_in_redis(redis_client, settings, "redis", SILENCE.total_seconds() + beyond_s)
    age_in_database(admin, settings, "database", SILENCE.total_seconds() + beyond_s)

    assert [each.alive for each in read(redis_client, settings)] == [alive, alive]


@pytest.mark.parametrize("value", [b"", b"\xff", b"{}", b'{"kind": "boss"}', b"[" * 10_000, b"null"])
def test_garbled_entry_is_passed_over(
    store: RedisHeartbeats, redis_client: redis.Redis, settings: Settings, value: bytes
) -> None:
    store.write("ours", heartbeat())
    for name in (b"garbled", b"\xff\x00"):
        redis_client.zadd(f"{settings.namespace}:process_heartbeats", {name: 1e9})
        redis_client.hset(f"{settings.namespace}:processes", name, value)

    assert list(store.read()) == ["ours"]


@pytest.mark.parametrize("at", ["inf", "-inf", "1e300"])
def test_entry_with_an_impossible_time_is_passed_over(
    store: RedisHeartbeats, redis_client: redis.Redis, settings: Settings, at: str
) -> None:
    store.write("ours", heartbeat())
    redis_client.zadd(f"{settings.namespace}:process_heartbeats", {"ours": float(at)})

    assert store.read() == {}


def test_redis_key_of_another_type_leaves_the_databases_heartbeats(
    redis_client: redis.Redis, settings: Settings, postgres: Database
) -> None:
    redis_client.set(f"{settings.namespace}:process_heartbeats", "x")
    heartbeats.write_row("one", heartbeat())

    assert len(read(redis_client, settings)) == 1


def test_invalid_row_is_passed_over(postgres: Database, admin: Connection, settings: Settings) -> None:
    heartbeats.write_row("one", heartbeat())
    heartbeats.write_row("other", heartbeat())
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE {settings.schema_name}.processes SET queues = '7' WHERE id = 'one'")

    assert list(heartbeats.read_rows()) == ["other"]


def test_entries_without_a_heartbeat_for_a_day_leave_redis(
    store: RedisHeartbeats, redis_client: redis.Redis, settings: Settings
) -> None:
    for process_id, age_s in (("old", 86_401), ("young", 86_000)):
        store.write(process_id, heartbeat())
        age_in_redis(redis_client, settings, process_id, age_s)

    store.write("new", heartbeat())

    assert set(redis_client.hkeys(f"{settings.namespace}:processes")) == {b"young", b"new"}


def test_no_connection_is_held_between_heartbeats(postgres: Database) -> None:
    heartbeats.write_row("one", heartbeat())
    heartbeats.write_row("one", heartbeat(busy=5, stopped=True))

    assert database.is_closed()
    row = ProcessRow.get()
    assert (row.busy, row.stopped, ProcessRow.select().count()) == (5, True, 1)


def test_heartbeats_are_read_while_one_store_is_away(
    store: RedisHeartbeats, settings: Settings, redis_client: redis.Redis, postgres: Database
) -> None:
    heartbeats.write_row("one", heartbeat())
    nowhere = client_for("redis://localhost:1/0")

    without_redis = read_processes(nowhere, settings.namespace, NOW)
    postgres.execute_sql(f"DROP TABLE {settings.schema_name}.processes")
    without_both = read_processes(nowhere, settings.namespace, NOW)
    store.write("one", heartbeat())
    without_database = read_processes(redis_client, settings.namespace, NOW)

    assert (len(without_redis.every), without_redis.known) == (1, True)
    assert (len(without_both.every), without_both.known) == (0, False)
    assert (len(without_database.every), without_database.known) == (1, True)
