"""Whether the script that enqueues a message can take its key as well (D6)."""

from __future__ import annotations

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from redis.sentinel import Sentinel

from housekeeping.middleware.enqueueing.redis_queues import share_redis


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


def test_sentinel_clients_share_a_redis_only_if_identical() -> None:
    one, other = (Sentinel([("localhost", 26379)]).master_for(name) for name in ("a", "b"))

    assert share_redis(one, one)
    assert not share_redis(one, other)
