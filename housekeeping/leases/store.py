"""Where leases are kept: one round trip to Redis for each question."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, Protocol

import redis

from housekeeping.core.redis_client import retry_redis, translate_redis_errors

#: KEYS[1] is the lease, ARGV the token and the ttl in ms; returns whoever holds it now. Repeating it with
#: the same token changes nothing, so it may be asked again after a lost answer.
_OBTAIN: Final = """
local holder = redis.call("get", KEYS[1])
if holder and holder ~= ARGV[1] then return holder end
redis.call("set", KEYS[1], ARGV[1], "px", ARGV[2])
return ARGV[1]
"""
_RENEW: Final = """
if redis.call("get", KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call("pexpire", KEYS[1], ARGV[2])
"""
_RELEASE: Final = """
if redis.call("get", KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call("del", KEYS[1])
"""


class LeaseStore(Protocol):
    """Where leases are kept; safe to share between threads. Every method may raise `RedisUnavailable`."""

    def obtain(self, key: str, token: str, ttl: timedelta) -> str:
        """Take the lease unless another token holds it; returns the token that holds it now."""

    def renew(self, key: str, token: str, ttl: timedelta) -> bool:
        """Back to the full ttl; False when the token no longer holds it."""

    def release(self, key: str, token: str) -> bool:
        """Free it; False when the token no longer holds it."""

    def owner(self, key: str) -> str | None:
        """The token that holds it."""

    def remaining(self, key: str) -> timedelta | None:
        """Until it expires; None when nobody holds it."""


def release_with_retries(store: LeaseStore, key: str, token: str) -> bool:
    """Free a lease at the end of its run, in up to three tries; False when the token no longer held it.

    One that is gone after a try without an answer counts as given back: by that try, as far as anybody can tell.

    Raises:
      RedisUnavailable: No try got an answer; unless one took effect, others wait until the ttl is over.
    """
    tries = 0

    def release() -> bool:
        nonlocal tries
        tries += 1
        return store.release(key, token) or tries > 1

    return retry_redis(release)


class RedisLeaseStore:
    """Leases as Redis keys, one round trip for each call.

    Parameters:
      kind: What is held: leases proper, or another kind of thing that has one owner and a ttl.
    """

    def __init__(self, client: redis.Redis, namespace: str = "housekeeping", kind: str = "lease") -> None:
        self._client = client
        self._prefix = f"{namespace}:{kind}:"
        self._obtain: Any = client.register_script(_OBTAIN)
        self._renew: Any = client.register_script(_RENEW)
        self._release: Any = client.register_script(_RELEASE)

    def obtain(self, key: str, token: str, ttl: timedelta) -> str:
        # The answer may be lost though the lease was taken, and nobody else could ever give it back.
        return _text(retry_redis(lambda: self._obtain(keys=[self._prefix + key], args=[token, _ms(ttl)]), 2, 0))

    def renew(self, key: str, token: str, ttl: timedelta) -> bool:
        with translate_redis_errors():
            return bool(self._renew(keys=[self._prefix + key], args=[token, _ms(ttl)]))

    def release(self, key: str, token: str) -> bool:
        with translate_redis_errors():
            return bool(self._release(keys=[self._prefix + key], args=[token]))

    def owner(self, key: str) -> str | None:
        with translate_redis_errors():
            value: Any = self._client.get(self._prefix + key)
        return None if value is None else _text(value)

    def remaining(self, key: str) -> timedelta | None:
        with translate_redis_errors():
            left: Any = self._client.pttl(self._prefix + key)
        return timedelta(milliseconds=left) if left >= 0 else None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _ms(ttl: timedelta) -> int:
    return int(ttl.total_seconds() * 1000)
