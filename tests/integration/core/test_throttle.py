from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import redis

from housekeeping import Settings, throttle
from tests.internals.core import DeclarationError, RedisUnavailable
from tests.internals.core import redis_client as make_redis_client

MINUTE = timedelta(minutes=1)


def test_throttle_allows_at_most_count_calls_in_a_period(redis_client: redis.Redis) -> None:
    assert [throttle("mails", 3, MINUTE) for _ in range(5)] == [True, True, True, False, False]
    assert throttle("other mails", 3, MINUTE)


def test_throttle_does_not_count_refusals_and_forgets_old_calls(redis_client: redis.Redis, settings: Settings) -> None:
    key = f"{settings.namespace}:throttle:mails"
    assert [throttle("mails", 2, MINUTE) for _ in range(9)].count(True) == 2

    # The older of the two happened a minute ago, and a millisecond.
    oldest: Any = redis_client.zrange(key, 0, 0)[0]
    redis_client.zincrby(key, -60_001, oldest)

    assert [throttle("mails", 2, MINUTE), throttle("mails", 2, MINUTE)] == [True, False]
    assert redis_client.zcard(key) == 2


def test_throttle_allows_at_most_count_concurrent_calls(redis_client: redis.Redis) -> None:
    with ThreadPoolExecutor(max_workers=8) as threads:
        answers = list(threads.map(lambda _: throttle("mails", 5, MINUTE), range(64)))

    assert answers.count(True) == 5


def test_throttle_key_expires(redis_client: redis.Redis, settings: Settings) -> None:
    throttle("mails", 2, MINUTE)

    assert 0 < redis_client.pttl(f"{settings.namespace}:throttle:mails") <= 60_000


def test_throttle_without_redis_raises() -> None:
    with pytest.raises(RedisUnavailable):
        throttle("mails", 2, MINUTE, client=make_redis_client("unix:///nowhere/redis.sock"))


def test_throttle_with_invalid_count_or_period_is_rejected(redis_client: redis.Redis) -> None:
    with pytest.raises(DeclarationError, match="0 times"):
        throttle("mails", 0, MINUTE)
