"""Heartbeats in real servers: who is alive, by the servers' clocks, and what cannot be read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from housekeeping import Settings
from tests.internals.core import redis_client as client_for
from tests.internals.ledger import PROCESS_SILENCE as SILENCE
from tests.internals.ledger import Heartbeat, Process, RedisHeartbeats, read_processes

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def heartbeat(**changes: Any) -> Heartbeat:
    said: dict[str, Any] = {"kind": "worker", "host": "a", "pid": 7, "queues": ["q"], "threads": 8, "busy": 3}
    return Heartbeat(**{**said, "version": "1", "up_s": 60.0, **changes})


@pytest.fixture
def store(redis_client: redis.Redis, settings: Settings) -> RedisHeartbeats:
    return RedisHeartbeats(redis_client, settings.namespace)


def age_in_redis(client: redis.Redis, settings: Settings, process_id: str, seconds: float) -> None:
    client.zincrby(f"{settings.namespace}:process_heartbeats", -seconds, process_id)


def read(client: redis.Redis, settings: Settings) -> list[Process]:
    return list(read_processes(RedisHeartbeats(client, settings.namespace), NOW).every)


def test_start_of_a_process_is_by_the_clock_of_redis(
    store: RedisHeartbeats, redis_client: redis.Redis, settings: Settings
) -> None:
    store.write("one", heartbeat())

    [found] = read(redis_client, settings)

    assert abs(found.started_at - (NOW - timedelta(seconds=60))) < timedelta(seconds=20)


@pytest.mark.parametrize(("beyond_s", "alive"), [(-5, True), (1, False)])
def test_process_is_dead_after_three_missed_heartbeats(
    store: RedisHeartbeats, redis_client: redis.Redis, settings: Settings, beyond_s: float, alive: bool
) -> None:
    store.write("redis", heartbeat())
    age_in_redis(redis_client, settings, "redis", SILENCE.total_seconds() + beyond_s)

    assert [each.alive for each in read(redis_client, settings)] == [alive]


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


def test_redis_key_of_another_type_makes_the_processes_unknown(redis_client: redis.Redis, settings: Settings) -> None:
    redis_client.set(f"{settings.namespace}:process_heartbeats", "x")

    assert not read_processes(RedisHeartbeats(redis_client, settings.namespace), NOW).known


def test_entries_without_a_heartbeat_for_a_day_leave_redis(
    store: RedisHeartbeats, redis_client: redis.Redis, settings: Settings
) -> None:
    for process_id, age_s in (("old", 86_401), ("young", 86_000)):
        store.write(process_id, heartbeat())
        age_in_redis(redis_client, settings, process_id, age_s)

    store.write("new", heartbeat())

    assert set(redis_client.hkeys(f"{settings.namespace}:processes")) == {b"young", b"new"}


def test_processes_are_unknown_while_redis_is_away(settings: Settings) -> None:
    nowhere = client_for("redis://localhost:1/0")

    stores = (RedisHeartbeats(nowhere, settings.namespace), None)
    assert [read_processes(each, NOW).known for each in stores] == [
        False,
        False,
    ]
