"""At most so many times in any period, across all processes and machines."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import redis

from housekeeping.core.errors import DeclarationError
from housekeeping.core.redis_client import shared_redis, translate_redis_errors

#: KEYS[1] is a sorted set of the times of what went ahead. ARGV: a name for this one, how many may, the period in ms.
#: The server's clock: one for all callers.
_GO_AHEAD: Final = """
local moment = redis.call("time")
local now = moment[1] * 1000 + math.floor(moment[2] / 1000)
redis.call("zremrangebyscore", KEYS[1], "-inf", now - ARGV[3])
if redis.call("zcard", KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call("zadd", KEYS[1], now, ARGV[1])
redis.call("pexpire", KEYS[1], ARGV[3])
return 1
"""


def throttle(key: str, count: int, period: timedelta, client: redis.Redis | None = None) -> bool:
    """Whether it may go ahead: at most `count` times in any `period`; a yes is counted, a no is not.

    Raises:
      DeclarationError: When the count is below 1 or the period is no length of time.
      RedisUnavailable: Redis did not answer; it may have been counted.
    """
    if count < 1 or period < timedelta(milliseconds=1):
        raise DeclarationError(f"throttle {key!r}: {count} times in {period} cannot work; for example 10 in one minute")
    client = client or shared_redis.get()
    arguments: list[Any] = [uuid4().hex, count, int(period.total_seconds() * 1000)]
    with translate_redis_errors():
        return bool(client.eval(_GO_AHEAD, 1, f"{shared_redis.namespace}:throttle:{key}", *arguments))
