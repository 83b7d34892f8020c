"""Rate limit that all processes and machines share."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import redis

from housekeeping.core.errors import DeclarationError
from housekeeping.core.redis_client import shared_redis, translate_redis_errors

#: KEYS[1] is a sorted set with the time of each call that was allowed. ARGV: a unique name for this call, the maximum
#: number of calls, the period in ms. The time is Redis's, so that all callers share one clock.
_ALLOW: Final = """
local time = redis.call("time")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call("zremrangebyscore", KEYS[1], "-inf", now - ARGV[3])
if redis.call("zcard", KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call("zadd", KEYS[1], now, ARGV[1])
redis.call("pexpire", KEYS[1], ARGV[3])
return 1
"""


def throttle(key: str, count: int, period: timedelta, client: redis.Redis | None = None) -> bool:
    """Return whether the caller may proceed: at most `count` times in any `period`. A refusal is not counted.

    Raises:
      DeclarationError: If the count is below 1 or the period is below a millisecond.
      RedisUnavailable: If Redis did not answer; the call may have been counted.
    """
    if count < 1 or period < timedelta(milliseconds=1):
        raise DeclarationError(f"throttle {key!r}: {count} times in {period} cannot work; for example 10 in one minute")
    client = client or shared_redis.get()
    arguments: list[Any] = [uuid4().hex, count, int(period.total_seconds() * 1000)]
    with translate_redis_errors():
        return bool(client.eval(_ALLOW, 1, f"{shared_redis.namespace}:throttle:{key}", *arguments))
