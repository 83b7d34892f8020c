"""Where a key can be taken by the script that enqueues its message (semantics.md, D6)."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from redis.sentinel import Sentinel

from housekeeping.brokers import ReliableRedisBroker
from housekeeping.middleware.deduplication.enqueueing import share_redis
from housekeeping.middleware.deduplication.keys import DeduplicationKeys


class Overriding(RedisBroker):
    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        return message


class OverridingTheLastStep(RedisBroker):
    def do_enqueue(self, *arguments: Any) -> None: ...


def at(url: str) -> redis.Redis:
    client: redis.Redis = redis.Redis.from_url(url)
    return client


def keys_on(client: redis.Redis) -> DeduplicationKeys:
    return DeduplicationKeys(client, "n")


@pytest.mark.parametrize(
    ("theirs", "ours", "shared"),
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
def test_queue_and_keys_share_a_redis_when_they_are_in_one_database_of_one_server(
    theirs: str, ours: str, shared: bool
) -> None:
    assert share_redis(RedisBroker(client=at(theirs)), keys_on(at(ours))) is shared


def test_a_broker_made_from_parameters_shares_the_redis_that_they_name() -> None:
    assert share_redis(RedisBroker(), keys_on(at("redis://localhost/0")))
    assert not share_redis(RedisBroker(host="h", port=7000), keys_on(at("redis://localhost/0")))


def test_clients_of_sentinels_share_a_redis_only_when_they_are_one() -> None:
    one, other = (Sentinel([("localhost", 26379)]).master_for(name) for name in ("a", "b"))

    assert share_redis(RedisBroker(client=one), keys_on(one))
    assert not share_redis(RedisBroker(client=one), keys_on(other))


@pytest.mark.parametrize(
    ("kind", "shared"),
    [(RedisBroker, True), (ReliableRedisBroker, True), (Overriding, False), (OverridingTheLastStep, False)],
)
def test_a_broker_that_enqueues_in_its_own_way_is_left_to_do_so(kind: type[RedisBroker], shared: bool) -> None:
    client = at("redis://localhost")

    assert share_redis(kind(client=client), keys_on(client)) is shared


def test_no_other_broker_shares_a_redis() -> None:
    assert not share_redis(StubBroker(), keys_on(at("redis://localhost")))
