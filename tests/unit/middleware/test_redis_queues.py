"""Whether the script that enqueues a message can take its key as well (D6)."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from redis.sentinel import Sentinel

from tests.internals.core import redis_client
from tests.internals.middleware import share_redis


def at(url: str) -> redis.Redis:
    client: redis.Redis = redis.Redis.from_url(url)
    return client


@pytest.mark.parametrize(
    ("queues", "keys", "shared"),
    [
        ("redis://localhost", "redis://localhost:6379/0", True),
        ("redis://host:6380/2", "redis://user:secret@host:6380/2", True),
        ("redis://host", "redis://host/1", False),
        ("redis://host", "redis://other", False),
        ("redis://host:6379", "redis://host:6380", False),
        ("unix:///run/redis.sock", "unix:///run/redis.sock?db=0", True),
        ("unix:///run/redis.sock", "unix:///run/redis.sock?db=1", False),
        ("unix:///run/redis.sock", "redis://localhost", False),
    ],
)
def test_clients_share_a_redis_if_server_and_database_are_equal(queues: str, keys: str, shared: bool) -> None:
    assert share_redis(at(queues), at(keys)) is shared


def test_broker_made_from_parameters_shares_the_redis_they_name() -> None:
    keys = at("redis://localhost/0")

    assert share_redis(RedisBroker().client, keys)
    assert not share_redis(RedisBroker(host="h", port=7000).client, keys)


def by_sentinel(service: str, *hosts: str, **options: Any) -> redis.Redis:
    client: redis.Redis = Sentinel([(host, 26379) for host in hosts]).master_for(service, **options)
    return client


def test_clients_of_equal_sentinels_service_and_database_share_a_redis() -> None:
    keys = redis_client("redis+sentinel://me:secret@one,two/a/0")

    assert share_redis(by_sentinel("a", "one", "two"), keys)
    assert share_redis(by_sentinel("a", "two", "one"), keys)
    assert not share_redis(by_sentinel("b", "one", "two"), keys)
    assert not share_redis(by_sentinel("a", "one", "three"), keys)
    assert not share_redis(by_sentinel("a", "one", "two", db=1), keys)
    assert not share_redis(at("redis://one:26379"), keys)


def test_replica_of_a_sentinel_shares_no_redis() -> None:
    sentinel = Sentinel([("one", 26379)])

    assert not share_redis(sentinel.slave_for("a"), sentinel.master_for("a"))
    assert not share_redis(sentinel.slave_for("a"), sentinel.slave_for("a"))
