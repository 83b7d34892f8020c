"""Exclusive leases: a named lock with an owner and a ttl, which frees itself when its holder dies."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Protocol
from uuid import uuid4

import redis

from housekeeping.foundation.db import database
from housekeeping.foundation.errors import DeclarationError, HousekeepingError, LeaseHeld, LeaseLost, RedisUnavailable
from housekeeping.foundation.redis_client import insist, reaching_redis, shared_redis
from housekeeping.foundation.renewal import Kept, elapsed, renewals

logger = logging.getLogger(__name__)

#: Below this a lease cannot be renewed in time (semantics.md, Actor options).
SHORTEST_TTL: Final = timedelta(seconds=3)

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
        return _text(insist(lambda: self._obtain(keys=[self._prefix + key], args=[token, _ms(ttl)]), 2, 0))

    def renew(self, key: str, token: str, ttl: timedelta) -> bool:
        with reaching_redis():
            return bool(self._renew(keys=[self._prefix + key], args=[token, _ms(ttl)]))

    def release(self, key: str, token: str) -> bool:
        with reaching_redis():
            return bool(self._release(keys=[self._prefix + key], args=[token]))

    def owner(self, key: str) -> str | None:
        with reaching_redis():
            value: Any = self._client.get(self._prefix + key)
        return None if value is None else _text(value)

    def remaining(self, key: str) -> timedelta | None:
        with reaching_redis():
            left: Any = self._client.pttl(self._prefix + key)
        return timedelta(milliseconds=left) if left >= 0 else None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _ms(ttl: timedelta) -> int:
    return int(ttl.total_seconds() * 1000)


class ExclusiveLease:
    """A lease of one key: at most one holder at a time, across all processes and machines.

    ::

        with ExclusiveLease("reports/nightly", timedelta(minutes=10)) as lease:
            for page in pages:
                lease.check()
                publish(page)

    Parameters:
      key: Its name, shared with actors' ``exclusive_lease={"key": ...}``.
      ttl: How long it outlives a holder that died; at least 3 s.
      client: A Redis client or `LeaseStore`; the installed application's Redis unless said.
      retries: How often `with` tries again while somebody else holds it.
      sleep: Seconds between the tries, or a callable of the number of tries so far.

    Raises:
      DeclarationError: When the ttl is too short to be renewed in time.
    """

    def __init__(
        self,
        key: str,
        ttl: timedelta,
        client: redis.Redis | LeaseStore | None = None,
        retries: int = 0,
        sleep: float | Callable[[int], float] = 0.1,
    ) -> None:
        if not isinstance(ttl, timedelta) or ttl < SHORTEST_TTL:
            raise DeclarationError(f"lease {key!r}: ttl is {ttl!r}; it should be a timedelta of at least 3 seconds")
        self.key = key
        self.ttl = ttl
        self._retries = retries
        self._sleep = sleep
        self._token: str | None = None
        self._asked_at = 0.0
        self._pid = os.getpid()
        self._kept: Kept | None = None
        if client is None:
            client = shared_redis.get()
        self._store: LeaseStore = (
            RedisLeaseStore(client, shared_redis.namespace) if isinstance(client, redis.Redis) else client
        )

    def try_obtain(self) -> str | None:
        """Take the lease; returns the token, None when it is held elsewhere (by this very object, too).

        Raises:
          HousekeepingError: Inside an open database transaction: the lease would outlive its rollback.
          RedisUnavailable: Redis did not answer; the lease may be ours until its ttl is over, unused.
        """
        if database.obj is not None and database.in_transaction():
            raise HousekeepingError(f"lease {self.key!r} cannot be taken inside an open database transaction")
        # The time first, so that whoever meets the lease can tell for how long it has been held.
        token = f"{int(time.time() * 1000)}-{uuid4().hex}"
        asked_at = elapsed()
        if self._store.obtain(self.key, token, self.ttl) != token:
            return None
        self._token, self._asked_at, self._pid = token, asked_at, os.getpid()
        return token

    def renew(self) -> bool:
        """Back to the full ttl; False when it is no longer ours."""
        return self._token is not None and self._ours() and self._store.renew(self.key, self._token, self.ttl)

    def cancel(self) -> bool:
        """Give it back; False when it was no longer ours."""
        token, self._token = self._token, None
        if self._kept is not None:
            renewals.stop(self._kept)
            self._kept = None
        return token is not None and self._ours() and self._store.release(self.key, token)

    def exists(self) -> bool:
        """Whether anybody holds it."""
        return self._store.owner(self.key) is not None

    def owner(self) -> str | None:
        """The holder's token."""
        return self._store.owner(self.key)

    def remaining(self) -> timedelta | None:
        """Until it expires unless it is renewed; None when nobody holds it."""
        return self._store.remaining(self.key)

    def held_for(self) -> timedelta | None:
        """For how long its holder has had it, by the clocks of the two machines; None when unknown."""
        moment, _, _ = (self.owner() or "").partition("-")
        return timedelta(milliseconds=max(0, time.time() * 1000 - int(moment))) if moment.isdigit() else None

    def keep(self) -> None:
        """Renew in the background from now until `cancel`."""
        if self._kept is None:
            self._kept = renewals.keep(f"lease {self.key!r}", self.renew, self.ttl, self._asked_at)

    def _ours(self) -> bool:
        # A forked child has a copy of its parent's token, and must not give the lease back for it.
        return self._pid == os.getpid()

    @property
    def lost(self) -> bool:
        """Whether it expired, was released by hand, or could not be renewed in time; asks nobody."""
        return self._kept is None or self._kept.lost

    def check(self) -> None:
        """Return while the lease is surely ours.

        Raises:
          LeaseLost: When it is not, see `lost`.
        """
        if self.lost:
            raise LeaseLost(f"lease {self.key!r} was lost")

    def __enter__(self) -> ExclusiveLease:
        tries = 0
        while self.try_obtain() is None:
            if tries >= self._retries:
                raise LeaseHeld(f"lease {self.key!r} is held elsewhere")
            tries += 1
            time.sleep(self._sleep(tries) if callable(self._sleep) else self._sleep)
        self.keep()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lost = self.lost
        try:
            ours = self.cancel()
        except RedisUnavailable as unreachable:
            # Held to the end all the same; it expires by itself.
            logger.warning("Lease %r could not be given back: %s", self.key, unreachable)
            ours = True
        if (lost or not ours) and error is None:
            raise LeaseLost(f"lease {self.key!r} was lost before the end of its block")
