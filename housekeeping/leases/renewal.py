"""Background renewal of keys that expire in Redis: leases, deduplication keys, marks of running messages."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from housekeeping.core.errors import RedisUnavailable

logger = logging.getLogger(__name__)

#: A shorter lease cannot be renewed in time.
SHORTEST_TTL: Final = timedelta(seconds=3)

#: Part of the ttl by which a holder gives up before the server expires its key.
_MARGIN: Final = 0.1
_FINISH_EVERY_S: Final = 1.0

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
      renew: Renews the key and returns whether it is still held. `RedisUnavailable` is retried.
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
        except RedisUnavailable as error:
            logger.warning("Could not renew %s: %s", self.name, error)
            self.due_at = self._clock() + min(1.0, self._ttl / 10)
            return True
        self.good_until = safe_until(requested_at, self._good_for)
        self.due_at = requested_at + self._ttl / 3
        return not self.stopped


class Unfinished(Renewal):
    """End of a message that Redis has not recorded yet. It is tried again every second until Redis answers.

    Parameters:
      finish: Records the end; safe to repeat. Any error but `RedisUnavailable` ends the attempts.
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
        except RedisUnavailable:
            self.due_at = self._clock() + _FINISH_EVERY_S
            return True
        except Exception:
            logger.exception("Could not finish %s", self.name)
        return False
