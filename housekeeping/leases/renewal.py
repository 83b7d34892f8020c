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

from housekeeping.core.errors import RedisUnavailable

logger = logging.getLogger(__name__)

#: Of the ttl: given up this long before the server would let go, so that the holder stops first.
_MARGIN: Final = 0.1

#: A clock that goes on while the machine sleeps, where there is one: the server's goes on too.
#: Looked up at each reading, so that a simulator can put another in its place, here and nowhere else.
read_clock: Callable[[], float] = functools.partial(
    time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
)


def elapsed() -> float:
    """Seconds since some moment, by the clock that leases are measured with."""
    return read_clock()


def safe_until(since: float, ttl_s: float) -> float:
    """Until when a holder may count on what it asked for at `since`, both by `elapsed`."""
    return since + ttl_s * (1 - _MARGIN)


class Renewal:
    """Something that is being renewed, from `Renewals.start` until `stop`.

    Parameters:
      renew: Says whether it is still ours; may raise `RedisUnavailable`, which is tried again.
      ttl: Its full life; renewed at a third of it (promise L2).
      since: When it was asked for, by `elapsed`; an answer may be late, and the server did not wait for it.
      on_lost: Called once when it is lost, in another thread; not after `stop` has returned.
      returns: Whether `renew` may get it back after its ttl has run out; then only an answer says that it is lost.
    """

    def __init__(
        self,
        name: str,
        renew: Callable[[], bool],
        ttl: timedelta,
        since: float,
        clock: Callable[[], float] = elapsed,
        on_lost: Callable[[], object] | None = None,
        returns: bool = False,
    ) -> None:
        self.name = name
        self._renew = renew
        self._ttl = ttl.total_seconds()
        self._clock = clock
        self._good_for = math.inf if returns else self._ttl
        self._on_lost = on_lost
        self._telling = threading.Lock()
        self._lost = False
        self.stopped = False
        self.good_until = safe_until(since, self._good_for)
        self.due_at = since + self._ttl / 3

    @property
    def lost(self) -> bool:
        """Whether it is no longer ours, or may not be: renewal failed until the ttl less a margin had passed."""
        return self._lost or self._clock() > self.good_until

    @property
    def tell_at(self) -> float:
        """When `tell` should be called at the latest, by `elapsed`; infinite when there is nobody to tell."""
        return math.inf if self._on_lost is None else self.good_until

    def tell(self) -> None:
        """Tell whoever wants to know, once, if it is lost."""
        with self._telling:
            if self.stopped or not self.lost or self._on_lost is None:
                return
            # An answer that comes after this makes no difference any more.
            self._lost, on_lost, self._on_lost = True, self._on_lost, None
            logger.warning("Lost %s", self.name)
            on_lost()

    def stop(self) -> None:
        """Renew no more; it expires by itself unless it is released."""
        with self._telling:
            self.stopped = True

    def disown(self) -> None:
        """Have nothing more to do with it, in a forked child."""
        # Its parent may have been telling, and only that process could let go of the lock.
        self._lost, self._on_lost, self._telling = True, None, threading.Lock()

    def step(self) -> bool:
        """Renew once and set `due_at` to the next time; False when there is none."""
        if self.stopped or self.lost:
            return False
        asked_at = self._clock()
        try:
            if not self._renew():
                self._lost = True
                return False
        except RedisUnavailable as error:
            logger.warning("Could not renew %s: %s", self.name, error)
            self.due_at = self._clock() + min(1.0, self._ttl / 10)
            return True
        self.good_until = safe_until(asked_at, self._good_for)
        self.due_at = asked_at + self._ttl / 3
        return not self.stopped


class _Round:
    """A thread that does something to each thing in use when its moment has come.

    Parameters:
      in_use: What there is; read and changed with `lock` held.
      moment: When the next is due, by `elapsed`; infinite: never.
    """

    def __init__(
        self,
        name: str,
        in_use: set[Renewal],
        lock: threading.Lock,
        moment: Callable[[Renewal], float],
        act: Callable[[Renewal], None],
    ) -> None:
        self._in_use = in_use
        self._moment = moment
        self._act = act
        self._changed = threading.Condition(lock)
        self._wakes_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"housekeeping-{name}", daemon=True)

    def look_at(self, kept: Renewal) -> None:
        """Begin, or wake up if this one comes before all others; with the lock held."""
        if self._thread.ident is None:
            self._thread.start()
        elif self._moment(kept) < self._wakes_at:
            self._changed.notify()

    def _run(self) -> None:
        while True:
            kept = self._next()
            try:
                self._act(kept)
            except Exception:
                # Whoever was to be told that it is lost could not be: the others must be all the same.
                logger.exception("Could not renew %s", kept.name)

    def _next(self) -> Renewal:
        with self._changed:
            while True:
                # As many as messages at work: few enough to look at all.
                kept = min(self._in_use, key=self._moment, default=None)
                self._wakes_at = math.inf if kept is None else self._moment(kept)
                left = self._wakes_at - elapsed()
                if kept is not None and left < 0:
                    return kept
                self._changed.wait(None if math.isinf(left) else max(left, 0.001))


class Renewals:
    """Renews everything in use of this process in the background, and tells when something is lost.

    Two threads, started when they are needed: one asks the server, and may have to wait for its answer; the
    other only looks at the clock, so that a holder is told in time although the server is silent.
    """

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._after_fork)

    def _begin(self) -> None:
        self._in_use: set[Renewal] = set()
        self._lock = threading.Lock()
        self._renewing = _Round("renewal", self._in_use, self._lock, lambda kept: kept.due_at, self._renew)
        self._watching = _Round("lease-watch", self._in_use, self._lock, lambda kept: kept.tell_at, self._watch)

    def _after_fork(self) -> None:
        # A forked child has neither the threads nor a claim to what its parent holds.
        for kept in self._in_use:
            kept.disown()
        self._begin()

    def start(
        self,
        name: str,
        renew: Callable[[], bool],
        ttl: timedelta,
        since: float,
        on_lost: Callable[[], object] | None = None,
        returns: bool = False,
    ) -> Renewal:
        """Renew in the background until `stop` or until it is lost; for the parameters see `Renewal`."""
        kept = Renewal(name, renew, ttl, since, on_lost=on_lost, returns=returns)
        with self._lock:
            self._in_use.add(kept)
            self._renewing.look_at(kept)
            if on_lost is not None:
                self._watching.look_at(kept)
        return kept

    def stop(self, kept: Renewal) -> None:
        """Renew it no more."""
        kept.stop()
        with self._lock:
            self._in_use.discard(kept)

    def _renew(self, kept: Renewal) -> None:
        try:
            goes_on = kept.step()
        except Exception:
            logger.exception("Could not renew %s", kept.name)
            kept.due_at, goes_on = elapsed() + 1.0, True
        if not goes_on:
            kept.tell()
            self.stop(kept)

    def _watch(self, kept: Renewal) -> None:
        kept.tell()


renewals: Final = Renewals()
