"""Listing of keys for operators, on a Redis with many keys."""

from __future__ import annotations

from datetime import timedelta

import pytest
import redis

from housekeeping import Settings
from tests.integration.middleware.step_worker import counting
from tests.internals.middleware import DeduplicationKeys, held_keys, key_step, release_key


@pytest.fixture
def namespace(settings: Settings, redis_client: redis.Redis) -> str:
    """Return a namespace with glob characters that has forty keys."""
    name = f"{settings.namespace}:[a]*"
    keys = DeduplicationKeys(redis_client, name)
    for number in range(40):
        keys.take(key_step("claim", f"work:{number:02}", "m", timedelta(minutes=1)))
    return name


def test_all_keys_are_listed_by_name(redis_client: redis.Redis, namespace: str) -> None:
    held, more = held_keys(redis_client, namespace, 40)

    assert ([each.key for each in held], more) == ([f"work:{number:02}" for number in range(40)], False)


def test_key_of_another_type_is_left_out(redis_client: redis.Redis, namespace: str) -> None:
    redis_client.set(f"{DeduplicationKeys(redis_client, namespace).prefix}work:40", "of another program")

    held, more = held_keys(redis_client, namespace, 50)

    assert ([each.key for each in held][-1], more) == ("work:39", False)


def test_listing_reads_no_more_of_redis_than_its_limit(redis_client: redis.Redis, namespace: str) -> None:
    more = [key_step("claim", f"work:more{number}", "m", timedelta(minutes=1)) for number in range(2000)]
    DeduplicationKeys(redis_client, namespace).take_many(more)

    with counting(namespace.partition("[")[0]) as for_all:
        assert held_keys(redis_client, namespace, 2040)[1] is False
    with counting(namespace.partition("[")[0]) as for_two:
        assert held_keys(redis_client, namespace, 2)[1] is True

    assert for_two.count("SCAN") < for_all.count("SCAN")


def test_key_is_removed_once(redis_client: redis.Redis, namespace: str) -> None:
    was = release_key(redis_client, namespace, "work:07")

    assert was is not None and (was.message_id, was.state, was.actor) == ("m", "waiting", "work")
    assert release_key(redis_client, namespace, "work:07") is None
