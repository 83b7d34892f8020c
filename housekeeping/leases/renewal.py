"""Choice of the lease store, leases in Redis, and background renewal of leases and keys.

Leases, deduplication keys and marks of running messages are renewed by the same threads, which act on all renewals of
the process when they are due. Each operation on a lease is one round trip.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import redis

from housekeeping.core.errors import ServerUnavailable
from housekeeping.core.logs import typed_error_line
from housekeeping.core.redis import (
    GIVEN,
    is_rejection,
    milliseconds,
    named,
    read_each,
    read_scripts,
    redis_client,
    retry_on_outage,
    shared_redis,
    text,
    translate_redis_errors,
)
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database
from housekeeping.ledger.leases import LeaseStore, PostgresLeaseStore
from housekeeping.ledger.schema import use_database

logger = logging.getLogger(__name__)

#: A shorter lease cannot be renewed in time.
SHORTEST_TTL: Final = timedelta(seconds=3)

#: Part of the ttl by which a holder gives up before the server expires its key.
_MARGIN: Final = 0.1
_FINISH_EVERY_S: Final = 1.0
_PAGE: Final = 1000  # keys per round trip

#: Clock that continues while the machine is suspended, as the server's does. It is looked up at each reading, so that a
#: simulator can replace it here.
read_clock: Callable[[], float] = functools.partial(
    time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
)


def elapsed() -> float:
    """Return the current reading, in seconds, of the monotonic clock that measures leases."""
    return read_clock()


def safe_until(since: float, ttl_s: float) -> float:
    """Return the time until which a key requested at `since` is held for certain; both are readings of `elapsed`."""
    return since + ttl_s * (1 - _MARGIN)


class Renewal:
    """Renewal of one key, from `Renewals.start` until `stop`.

    Parameters:
      name: What is renewed, for log lines.
      renew: Renews the key and returns whether it is still held. `ServerUnavailable` is retried.
      ttl: Full ttl of the key; it is renewed after each third (promise L2).
      since: Reading of `elapsed` when the key was requested. The ttl counts from there, because the answer can be late.
      on_lost: Called once when the key is lost, in another thread; not after `stop` has returned.
      recoverable: Whether `renew` can get the key back after its ttl. Then only a False of `renew` means that it is
      lost.
    """

    def __init__(
        self,
        name: str,
        renew: Callable[[], bool],
        ttl: timedelta,
        since: float,
        clock: Callable[[], float] = elapsed,
        on_lost: Callable[[], object] | None = None,
        recoverable: bool = False,
    ) -> None:
        self.name = name
        self._renew = renew
        self._ttl = ttl.total_seconds()
        self._clock = clock
        self._good_for = math.inf if recoverable else self._ttl
        self._on_lost = on_lost
        self._notifying = threading.Lock()
        self._lost = False
        self.stopped = False
        self.good_until = safe_until(since, self._good_for)
        self.due_at = since + self._ttl / 3

    @property
    def lost(self) -> bool:
        """Whether the key is no longer held, or might not be: no renewal succeeded for nine tenths of the ttl."""
        return self._lost or self._clock() > self.good_until

    @property
    def notify_at(self) -> float:
        """When `notify_if_lost` must be called, as a reading of `elapsed`; infinite without a callback."""
        return math.inf if self._on_lost is None else self.good_until

    def notify_if_lost(self) -> None:
        """Call `on_lost`, once, if the key is lost."""
        with self._notifying:
            if self.stopped or not self.lost or self._on_lost is None:
                return
            # A renewal that succeeds after this has no effect.
            self._lost, on_lost, self._on_lost = True, self._on_lost, None
            logger.warning("Lost %s", self.name)
            on_lost()

    def stop(self) -> None:
        """Stop the renewal; the key expires unless it is released."""
        with self._notifying:
            self.stopped = True

    def disown(self) -> None:
        """Give the key up in a forked child, whose parent still holds it."""
        # The parent may have held the lock during the fork, and it cannot be unlocked in the child.
        self._lost, self._on_lost, self._notifying = True, None, threading.Lock()

    def step(self) -> bool:
        """Renew once and set `due_at`; return False if the key was lost or the renewal stopped."""
        if self.stopped or self.lost:
            return False
        requested_at = self._clock()
        try:
            if not self._renew():
                self._lost = True
                return False
        except ServerUnavailable as error:
            logger.warning("Could not renew %s: %s", self.name, error)
            self.due_at = self._clock() + min(1.0, self._ttl / 10)
            return True
        self.good_until = safe_until(requested_at, self._good_for)
        self.due_at = requested_at + self._ttl / 3
        return not self.stopped


class Unfinished(Renewal):
    """End of a message that Redis has not recorded yet. It is tried again every second until Redis answers.

    Parameters:
      finish: Records the end; safe to repeat. `ServerUnavailable` is retried unless Redis rejects a command.
      within: How long to try. After that, the message's keys have expired.
    """

    def __init__(self, name: str, finish: Callable[[], object], within: timedelta, since: float) -> None:
        super().__init__(name, lambda: bool(finish()), within, since)
        self.due_at = since + _FINISH_EVERY_S

    def step(self) -> bool:
        """Call `finish` once; return whether it must be called again, at `due_at`."""
        if self.lost:
            return False
        try:
            self._renew()
        except Exception as error:
            if isinstance(error, ServerUnavailable) and not is_rejection(error):
                self.due_at = self._clock() + _FINISH_EVERY_S
                return True
            logger.error("Could not finish %s: %s", self.name, typed_error_line(error))
        return False


#: How long the thread of an idle process stays awake. A running mark is renewed after 10 s.
_LINGER_S: Final = 10.0


class _TimerThread:
    """Thread that acts on each renewal when it is due.

    Parameters:
      active: The renewals; read and changed with `lock` held.
      due: Returns the reading of `elapsed` at which a renewal is due; infinite for never.
      act: Called with a renewal that is due.
    """

    def __init__(
        self,
        name: str,
        active: set[Renewal],
        lock: threading.Lock,
        due: Callable[[Renewal], float],
        act: Callable[[Renewal], None],
    ) -> None:
        self._active = active
        self._due = due
        self._act = act
        self._changed = threading.Condition(lock)
        self._wakes_at = 0.0
        self._is_used = False
        self._thread = threading.Thread(target=self._run, name=f"housekeeping-{name}", daemon=True)

    def schedule(self, renewal: Renewal) -> None:
        """Start the thread, or wake it if this renewal is due first. Called with the lock held."""
        self._is_used = True
        if self._thread.ident is None:
            self._thread.start()
        elif self._due(renewal) < self._wakes_at:
            self._changed.notify()

    def _run(self) -> None:
        while True:
            renewal = self._next()
            try:
                self._act(renewal)
            except Exception:
                # One failing callback must not prevent the others.
                logger.exception("Could not renew %s", renewal.name)

    def _next(self) -> Renewal:
        with self._changed:
            while True:
                # There are as many renewals as current messages: few enough to compare all.
                renewal, now = min(self._active, key=self._due, default=None), elapsed()
                if renewal is not None:
                    self._wakes_at = self._due(renewal)
                else:
                    # Most messages end long before their renewal is due. With a time to wake at, the next ones need
                    # not wake the thread.
                    self._wakes_at, self._is_used = (now + _LINGER_S if self._is_used else math.inf), False
                left = self._wakes_at - now
                if renewal is not None and left < 0:
                    return renewal
                self._changed.wait(None if math.isinf(left) else max(left, 0.001))


class Renewals:
    """All renewals of this process.

    Two threads are started on demand. One renews, and may wait for Redis. The other only watches the clock, so that a
    holder is notified in time even if Redis does not answer.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._after_fork)

    def _reset(self) -> None:
        self._active: set[Renewal] = set()
        self._lock = threading.Lock()
        self._renewing = _TimerThread("renewal", self._active, self._lock, lambda renewal: renewal.due_at, self._renew)
        self._watching = _TimerThread(
            "lease-watch", self._active, self._lock, lambda renewal: renewal.notify_at, self._watch
        )

    def _after_fork(self) -> None:
        # A forked child has neither the threads nor the keys of its parent.
        for renewal in self._active:
            renewal.disown()
        self._reset()

    def start(
        self,
        name: str,
        renew: Callable[[], bool],
        ttl: timedelta,
        since: float,
        on_lost: Callable[[], object] | None = None,
        recoverable: bool = False,
    ) -> Renewal:
        """Renew in the background until `stop`, or until the key is lost; see `Renewal` for the parameters."""
        renewal = Renewal(name, renew, ttl, since, on_lost=on_lost, recoverable=recoverable)
        self._add(renewal)
        return renewal

    def finish_later(self, name: str, finish: Callable[[], object], within: timedelta) -> None:
        """Record the end of a message as soon as Redis answers; see `Unfinished` for the parameters."""
        self._add(Unfinished(name, finish, within, elapsed()))

    def _add(self, renewal: Renewal) -> None:
        with self._lock:
            self._active.add(renewal)
            self._renewing.schedule(renewal)
            if renewal.notify_at < math.inf:
                self._watching.schedule(renewal)

    def stop(self, renewal: Renewal) -> None:
        """Stop a renewal."""
        renewal.stop()
        with self._lock:
            self._active.discard(renewal)

    def _renew(self, renewal: Renewal) -> None:
        try:
            continues = renewal.step()
        except Exception:
            logger.exception("Could not renew %s", renewal.name)
            renewal.due_at, continues = elapsed() + 1.0, True
        if not continues:
            renewal.notify_if_lost()
            self.stop(renewal)

    def _watch(self, renewal: Renewal) -> None:
        renewal.notify_if_lost()


renewals: Final = Renewals()


#: The scripts of the file beside this module, by name.
_LUA: Final = read_scripts(__file__)
_OBTAIN: Final = _LUA["obtain"]
_RENEW: Final = _LUA["renew"]
_RELEASE: Final = _LUA["release"]


class RedisLeaseStore:
    """Leases as Redis keys.

    Parameters:
      kind: Part of each key: ``lease``, or another kind of resource with one owner and a ttl.
    """

    def __init__(self, client: redis.Redis, namespace: str = "housekeeping", kind: str = "lease") -> None:
        self._client = client
        self._prefix = f"{namespace}:{kind}:"
        self._obtain: Any = client.register_script(GIVEN + _OBTAIN)
        self._renew: Any = client.register_script(GIVEN + _RENEW)
        self._release: Any = client.register_script(GIVEN + _RELEASE)

    def name(self, key: str) -> str:
        """Return the name of a lease in Redis."""
        return self._prefix + key

    def obtain(self, key: str, token: str, ttl: timedelta) -> str:
        # Retried: a lost answer would leave an acquired lease unreleased until its ttl.
        given = named(token=token, ttl=milliseconds(ttl))
        return text(retry_on_outage(lambda: self._obtain(keys=[self._prefix + key], args=[given]), 2, 0))

    def renew(self, key: str, token: str, ttl: timedelta) -> bool:
        with translate_redis_errors():
            return bool(self._renew(keys=[self._prefix + key], args=[named(token=token, ttl=milliseconds(ttl))]))

    def release(self, key: str, token: str) -> bool:
        with translate_redis_errors():
            return bool(self._release(keys=[self._prefix + key], args=[named(token=token)]))

    def owner(self, key: str) -> str | None:
        with translate_redis_errors():
            value: Any = self._client.get(self._prefix + key)
        return None if value is None else text(value)

    def remaining(self, key: str) -> timedelta | None:
        with translate_redis_errors():
            left: Any = self._client.pttl(self._prefix + key)
        return timedelta(milliseconds=left) if left >= 0 else None

    def held(self, only: str | None = None) -> Iterator[tuple[str, str, timedelta]]:
        with translate_redis_errors():
            names: list[Any] = [self._prefix + only] if only is not None else self._names()
            for start in range(0, len(names), _PAGE):
                page = names[start : start + _PAGE]
                for name, token, left in read_each(self._client, page, lambda pipeline, name: pipeline.get(name)):
                    if token is not None and left >= 0:
                        yield name.removeprefix(self._prefix), text(token), timedelta(milliseconds=left)

    def _names(self) -> list[Any]:
        return sorted(set(self._client.scan_iter(match=f"{self._prefix}*", count=_PAGE)))


def lease_store(settings: Settings) -> LeaseStore:
    """Return the lease store of an installation: Redis, or PostgreSQL if it is the only server.

    Raises:
      SettingsError: Neither is configured.
    """
    if shared_redis.is_replaced(settings):
        return PostgresLeaseStore()
    return RedisLeaseStore(redis_client(settings.require_redis_url()), settings.namespace)


def shared_lease_store() -> LeaseStore:
    """Return the default lease store of this process: that of the installed application, or of the settings.

    Raises:
      SettingsError: None is configured, or a setting is wrong.
    """
    if shared_redis.is_absent:
        return PostgresLeaseStore()
    if shared_redis.client is None:
        settings = Settings.load()
        if database.obj is None and settings.database_url is not None:
            use_database(settings)  # for the epochs, also where Redis has the leases
        if shared_redis.is_replaced(settings):
            return PostgresLeaseStore()
    return RedisLeaseStore(shared_redis.get(), shared_redis.namespace)
