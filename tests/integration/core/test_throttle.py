from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import redis

from housekeeping.core.errors import DeclarationError, RedisUnavailable
from housekeeping.core.redis_client import redis_client as make_redis_client
from housekeeping.core.settings import Settings
from housekeeping.core.throttle import throttle

MINUTE = timedelta(minutes=1)


def test_at_most_so_many_go_ahead_in_a_period(redis_client: redis.Redis) -> None:
    assert [throttle("mails", 3, MINUTE) for _ in range(5)] == [True, True, True, False, False]
    assert throttle("other mails", 3, MINUTE)


def test_a_refusal_is_not_counted_and_what_is_past_makes_room(redis_client: redis.Redis, settings: Settings) -> None:
    key = f"{settings.namespace}:throttle:mails"
    assert [throttle("mails", 2, MINUTE) for _ in range(9)].count(True) == 2

    # The older of the two happened a minute ago, and a millisecond.
    oldest: Any = redis_client.zrange(key, 0, 0)[0]
    redis_client.zincrby(key, -60_001, oldest)

    assert [throttle("mails", 2, MINUTE), throttle("mails", 2, MINUTE)] == [True, False]
    assert redis_client.zcard(key) == 2


def test_of_many_at_once_no_more_than_may_go_ahead(redis_client: redis.Redis) -> None:
    with ThreadPoolExecutor(max_workers=8) as threads:
        answers = list(threads.map(lambda _: throttle("mails", 5, MINUTE), range(64)))

    assert answers.count(True) == 5


def test_its_key_expires(redis_client: redis.Redis, settings: Settings) -> None:
    throttle("mails", 2, MINUTE)

    assert 0 < redis_client.pttl(f"{settings.namespace}:throttle:mails") <= 60_000


def test_without_redis_nothing_is_known() -> None:
    with pytest.raises(RedisUnavailable):
        throttle("mails", 2, MINUTE, client=make_redis_client("unix:///nowhere/redis.sock"))


def test_what_cannot_work_is_refused(redis_client: redis.Redis) -> None:
    with pytest.raises(DeclarationError, match="0 times"):
        throttle("mails", 0, MINUTE)
