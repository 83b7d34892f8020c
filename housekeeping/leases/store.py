"""Storage of leases in Redis, with one round trip for each operation."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, Protocol

import redis

from housekeeping.core.redis.client import milliseconds, retry_redis, text, translate_redis_errors

#: KEYS[1] is the lease, ARGV the token and the ttl in ms. Returns the token that holds the lease now. It can be
#: repeated with the same token, so it is retried after a lost answer.
_OBTAIN: Final = """
local holder = redis.call("get", KEYS[1])
if holder and holder ~= ARGV[1] then return holder end
if holder then redis.call("pexpire", KEYS[1], ARGV[2]) -- which a full Redis accepts
else redis.call("set", KEYS[1], ARGV[1], "px", ARGV[2]) end
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
    """Storage of leases, safe to share between threads. Every method may raise `RedisUnavailable`."""

    def obtain(self, key: str, token: str, ttl: timedelta) -> str:
        """Acquire the lease unless another token holds it; return the token that holds it now."""

    def renew(self, key: str, token: str, ttl: timedelta) -> bool:
        """Extend the lease to its full ttl; return False if the token no longer holds it."""

    def release(self, key: str, token: str) -> bool:
        """Release the lease; return False if the token no longer holds it."""

    def owner(self, key: str) -> str | None:
        """Return the token that holds the lease, if any."""

    def remaining(self, key: str) -> timedelta | None:
        """Return the time until the lease expires; None if it is free."""


def release_with_retries(store: LeaseStore, key: str, token: str) -> bool:
    """Release a lease at the end of its run, in up to three tries; return False if the token no longer held it.

    If the lease is free after a try without an answer, that try counts as its release.

    Raises:
      RedisUnavailable: If no try got an answer. The lease may stay until its ttl expires.
    """
    tries = 0

    def release() -> bool:
        nonlocal tries
        tries += 1
        return store.release(key, token) or tries > 1

    return retry_redis(release)


class RedisLeaseStore:
    """Leases as Redis keys.

    Parameters:
      kind: Part of each key: ``lease``, or another kind of resource with one owner and a ttl.
    """

    def __init__(self, client: redis.Redis, namespace: str = "housekeeping", kind: str = "lease") -> None:
        self._client = client
        self._prefix = f"{namespace}:{kind}:"
        self._obtain: Any = client.register_script(_OBTAIN)
        self._renew: Any = client.register_script(_RENEW)
        self._release: Any = client.register_script(_RELEASE)

    def name(self, key: str) -> str:
        """Return the name of a lease in Redis."""
        return self._prefix + key

    def obtain(self, key: str, token: str, ttl: timedelta) -> str:
        # Retried: a lost answer would leave an acquired lease unreleased until its ttl.
        return text(retry_redis(lambda: self._obtain(keys=[self._prefix + key], args=[token, milliseconds(ttl)]), 2, 0))

    def renew(self, key: str, token: str, ttl: timedelta) -> bool:
        with translate_redis_errors():
            return bool(self._renew(keys=[self._prefix + key], args=[token, milliseconds(ttl)]))

    def release(self, key: str, token: str) -> bool:
        with translate_redis_errors():
            return bool(self._release(keys=[self._prefix + key], args=[token]))

    def owner(self, key: str) -> str | None:
        with translate_redis_errors():
            value: Any = self._client.get(self._prefix + key)
        return None if value is None else text(value)

    def remaining(self, key: str) -> timedelta | None:
        with translate_redis_errors():
            left: Any = self._client.pttl(self._prefix + key)
        return timedelta(milliseconds=left) if left >= 0 else None
