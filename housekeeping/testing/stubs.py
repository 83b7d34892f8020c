"""Clock and lease store that need no server and no waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from housekeeping.core.errors import RedisUnavailable


class ManualClock:
    """Clock that only moves when it is advanced.

    Parameters:
      now: The start time; timezone-aware.
      tick: Time to advance on each call of `monotonic`.
    """

    def __init__(self, now: datetime = datetime(2026, 1, 1, tzinfo=UTC), tick: timedelta = timedelta()) -> None:
        self._start = now
        self._elapsed = timedelta()
        self._tick = tick

    def now(self) -> datetime:
        return self._start + self._elapsed

    def monotonic(self) -> float:
        self._elapsed += self._tick
        return self._elapsed.total_seconds()

    def advance(self, by: timedelta) -> None:
        """Advance the clock."""
        self._elapsed += by


class MemoryLeaseStore:
    """Lease store in memory that follows the rules of every lease store.

    Attributes:
      broken: Set to True to make every call fail like an unreachable server.
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.broken = False
        self._clock = clock or ManualClock()
        self._held: dict[str, tuple[str, datetime]] = {}
        self._lock = threading.Lock()

    def obtain(self, key: str, token: str, ttl: timedelta) -> str:
        with self._lock:
            holder = self._holder(key)
            if holder is None or holder == token:
                self._held[key] = (token, self._clock.now() + ttl)
                return token
            return holder

    def renew(self, key: str, token: str, ttl: timedelta) -> bool:
        with self._lock:
            if self._holder(key) != token:
                return False
            self._held[key] = (token, self._clock.now() + ttl)
            return True

    def release(self, key: str, token: str) -> bool:
        with self._lock:
            if self._holder(key) != token:
                return False
            del self._held[key]
            return True

    def owner(self, key: str) -> str | None:
        with self._lock:
            return self._holder(key)

    def remaining(self, key: str) -> timedelta | None:
        with self._lock:
            return None if self._holder(key) is None else self._held[key][1] - self._clock.now()

    def held(self, only: str | None = None) -> Iterator[tuple[str, str, timedelta]]:
        for key in [only] if only is not None else list(self._held):
            owner, left = self.owner(key), self.remaining(key)
            if owner is not None and left is not None:
                yield key, owner, left

    def _holder(self, key: str) -> str | None:
        if self.broken:
            raise RedisUnavailable(f"could not reach the store for {key!r}")
        token, expires_at = self._held.get(key, (None, self._clock.now()))
        return token if expires_at > self._clock.now() else None
