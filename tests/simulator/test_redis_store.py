"""Tests of Redis's rules on the real and the simulated server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from housekeeping import Settings
from tests.simulator.redis_client import SimulatedRedis
from tests.simulator.redis_store import RedisStore


@pytest.fixture(params=["real", "stand-in"])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "real":
        yield request.getfixturevalue("redis_client")
        return
    store = RedisStore(lambda: 1_700_000_000.25)

    def trip(name: str, effect: Callable[[], Any]) -> Any:
        return effect()

    yield SimulatedRedis(lambda: store, trip)


@pytest.fixture
def key(client: Any, settings: Settings) -> str:
    return f"{settings.namespace}:key"


def test_a_key_is_set_once_with_nx(client: Any, key: str) -> None:
    assert client.set(key, "1", nx=True, px=5000)
    assert client.set(key, "2", nx=True, px=5000) is None
    assert client.get(key) == b"1"
    assert 0 < client.pttl(key) <= 5000


def test_setting_a_key_again_takes_its_ttl_away(client: Any, key: str) -> None:
    client.set(key, "1", px=5000)

    client.set(key, "2")

    assert client.pttl(key) == -1


def test_a_key_that_is_not_there_has_no_ttl(client: Any, key: str) -> None:
    assert client.pttl(key) == -2
    assert not client.pexpire(key, 1000)


def test_keys_are_found_by_prefix_and_by_pattern(client: Any, key: str) -> None:
    client.set(f"{key}.one", "1")
    client.set(f"{key}.[two]", "2")

    assert sorted(client.keys(f"{key}.*")) == [f"{key}.[two]".encode(), f"{key}.one".encode()]
    assert client.keys(f"{key}.[a-z]*") == [f"{key}.one".encode()]
    assert client.keys(f"{key}.o?e") == [f"{key}.one".encode()]


def test_an_empty_hash_set_or_list_is_no_key(client: Any, key: str) -> None:
    client.hset(key, "a", "1")
    client.hdel(key, "a")
    assert client.exists(key) == 0

    client.sadd(key, "a")
    client.srem(key, "a")
    assert client.exists(key) == 0

    client.rpush(key, "a")
    client.lpop(key)
    assert client.exists(key) == 0


def test_a_ttl_stays_when_a_hash_changes(client: Any, key: str) -> None:
    client.hset(key, "a", "1")
    client.pexpire(key, 5000)

    client.hset(key, "b", "2")

    assert client.pttl(key) > 0
    assert client.hmget(key, ["a", "b", "c"]) == [b"1", b"2", None]
    assert client.hlen(key) == 2


def test_several_keys_are_read_at_once_and_other_types_are_nil(client: Any, key: str) -> None:
    client.set(f"{key}.a", "1")
    client.hset(f"{key}.b", "a", "1")

    assert client.mget(f"{key}.a", f"{key}.b", f"{key}.c") == [b"1", None, None]


def test_a_list_is_first_in_first_out(client: Any, key: str) -> None:
    client.rpush(key, "a", "b", "c")

    assert client.lpop(key) == b"a"
    assert client.lrange(key, 0, -1) == [b"b", b"c"]
    assert client.lrange(key, -1, -1) == [b"c"]
    assert client.llen(key) == 2


def test_sorted_set_is_read_by_score_and_rank(client: Any, key: str) -> None:
    client.zadd(key, {"b": 2, "a": 1, "c": 3, "aa": 1})

    assert client.zrangebyscore(key, "(1", 3) == [b"b", b"c"]
    assert client.zrevrangebyscore(key, "(3", "-inf", start=0, num=1) == [b"b"]
    assert client.zcount(key, 1, 1) == 2
    assert client.zremrangebyrank(key, 0, -3) == 2
    assert client.zrange(key, 0, -1) == [b"b", b"c"]
    assert client.zscore(key, "a") is None


def test_members_of_a_set_are_a_set(client: Any, key: str) -> None:
    assert client.sadd(key, "a", "b", "a") == 2
    assert client.smembers(key) == {b"a", b"b"}
    assert client.scard(key) == 2


def test_the_wrong_kind_of_value_is_refused(client: Any, key: str) -> None:
    client.set(key, "1")

    with pytest.raises(ResponseError, match="WRONGTYPE"):
        client.hget(key, "a")


def test_scripts_get_and_return_the_same_values_as_in_redis(client: Any, key: str) -> None:
    script = client.register_script("""
        redis.call("hset", KEYS[1], "n", ARGV[1] + 1)
        local there = redis.call("hget", KEYS[1], "n")
        local missing = redis.call("hget", KEYS[1], "m")
        return {there, missing == false and 1 or 0, 2.9, true, false, "never"}
    """)

    assert script(keys=[key], args=["1"]) == [b"2", 1, 2, 1, None, b"never"]


def test_a_script_ends_with_nothing_as_none(client: Any, key: str) -> None:
    assert client.register_script("return")(keys=[key]) is None
    assert client.register_script('return ""')(keys=[key]) == b""


def test_a_pipeline_answers_all_its_commands(client: redis.Redis, key: str) -> None:
    with client.pipeline(transaction=True) as pipeline:
        pipeline.set(key, "1")
        pipeline.get(key)
        pipeline.exists(key)
        answers = pipeline.execute()

    assert answers == [True, b"1", 1]
