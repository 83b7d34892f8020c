"""Renews what would expire while it is in use: leases, deduplication keys, marks of running messages."""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from housekeeping.foundation.errors import RedisUnavailable

logger = logging.getLogger(__name__)

#: Of the ttl: given up this long before the server would let go, so that the holder stops first.
_MARGIN: Final = 0.1

#: Seconds of a clock that goes on while the machine sleeps, where there is one: the server's goes on too.
elapsed: Final[Callable[[], float]] = functools.partial(
    time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
)


class Kept:
    """Something that is being renewed, from `Renewals.keep` until `stop`.

    Parameters:
      renew: Says whether it is still ours; may raise `RedisUnavailable`, which is tried again.
      ttl: Its full life; renewed at a third of it (semantics.md, L2).
      since: When it was asked for, by `elapsed`; an answer may be late, and the server did not wait for it.
    """

    def __init__(
        self,
        name: str,
        renew: Callable[[], bool],
        ttl: timedelta,
        since: float,
        clock: Callable[[], float] = elapsed,
    ) -> None:
        self.name = name
        self._renew = renew
        self._ttl = ttl.total_seconds()
        self._clock = clock
        self._good_until = since + self._ttl * (1 - _MARGIN)
        self._lost = False
        self.stopped = False
        self.due_at = since + self._ttl / 3

    @property
    def lost(self) -> bool:
        """Whether it is no longer ours, or may not be: renewal failed until the ttl less a margin had passed."""
        return self._lost or self._clock() > self._good_until

    def lose(self) -> None:
        """Count it as lost from now on."""
        self._lost = True

    def stop(self) -> None:
        """Renew no more; it expires by itself unless it is released."""
        self.stopped = True

    def step(self) -> bool:
        """Renew once and set `due_at` to the next time; False when there is none."""
        if self.stopped or self.lost:
            return False
        asked_at = self._clock()
        try:
            if not self._renew():
                self.lose()
                return False
        except RedisUnavailable as error:
            logger.warning("Could not renew %s: %s", self.name, error)
            self.due_at = self._clock() + min(1.0, self._ttl / 10)
            return True
        self._good_until = asked_at + self._ttl * (1 - _MARGIN)
        self.due_at = asked_at + self._ttl / 3
        return not self.stopped


class Renewals:
    """One background thread a process that renews everything in use; started by the first `keep`."""

    def __init__(self) -> None:
        self._in_use: set[Kept] = set()
        self._begin()
        os.register_at_fork(after_in_child=self._after_fork)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0

    def _after_fork(self) -> None:
        # A forked child has neither the thread nor a claim to what its parent holds.
        for kept in self._in_use:
            kept.lose()
        self._in_use = set()
        self._begin()

    def keep(self, name: str, renew: Callable[[], bool], ttl: timedelta, since: float) -> Kept:
        """Renew in the background until `stop` or until it is lost; for the parameters see `Kept`."""
        kept = Kept(name, renew, ttl, since)
        with self._changed:
            self._in_use.add(kept)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="housekeeping-renewal", daemon=True)
                self._thread.start()
            elif kept.due_at < self._wakes_at:
                self._changed.notify()
        return kept

    def stop(self, kept: Kept) -> None:
        """Renew it no more."""
        kept.stop()
        with self._changed:
            self._in_use.discard(kept)

    def _run(self) -> None:
        while True:
            kept = self._next()
            try:
                goes_on = kept.step()
            except Exception:
                logger.exception("Could not renew %s", kept.name)
                kept.due_at, goes_on = elapsed() + 1.0, True
            if not goes_on:
                self.stop(kept)

    def _next(self) -> Kept:
        """Wait for the next that is due."""
        with self._changed:
            while True:
                # As many as messages at work: few enough to look at all.
                kept = min(self._in_use, key=lambda each: each.due_at, default=None)
                self._wakes_at = math.inf if kept is None else kept.due_at
                if kept is not None and kept.due_at <= elapsed():
                    return kept
                self._changed.wait(None if kept is None else self._wakes_at - elapsed())


renewals: Final = Renewals()
