"""Renews what would expire while it is in use: leases, deduplication keys, marks of running messages."""

from __future__ import annotations

import heapq
import itertools
import logging
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


class Kept:
    """Something that is being renewed, from `Renewals.keep` until `stop`.

    Parameters:
      renew: Says whether it is still ours; may raise `RedisUnavailable`, which is tried again.
      ttl: Its full life; renewed at a third of it (semantics.md, L2).
    """

    def __init__(self, name: str, renew: Callable[[], bool], ttl: timedelta) -> None:
        self.name = name
        self._renew = renew
        self._ttl = ttl.total_seconds()
        self._good_until = time.monotonic() + self._ttl * (1 - _MARGIN)
        self._lost = False
        self.stopped = False

    @property
    def lost(self) -> bool:
        """Whether it is no longer ours, or may not be: renewal failed until the ttl less a margin had passed."""
        return self._lost or time.monotonic() > self._good_until

    def stop(self) -> None:
        """Renew no more; it expires by itself unless it is released."""
        self.stopped = True

    def step(self) -> float | None:
        """Renew once; returns the seconds until the next time, None when there is none."""
        if self.stopped or self.lost:
            return None
        asked_at = time.monotonic()
        try:
            if self._renew():
                self._good_until = asked_at + self._ttl * (1 - _MARGIN)
            else:
                self._lost = True
        except RedisUnavailable as error:
            logger.warning("Could not renew %s: %s", self.name, error)
            return min(1.0, self._ttl / 10)
        return None if self._lost else self._ttl / 3


class Renewals:
    """One background thread a process that renews everything in use; started by the first `keep`."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # A forked child has neither the thread nor a claim to what its parent holds.
        self._due: list[tuple[float, int, Kept]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def keep(self, name: str, renew: Callable[[], bool], ttl: timedelta) -> Kept:
        """Renew in the background until the result's `stop`, or until it is lost."""
        kept = Kept(name, renew, ttl)
        with self._changed:
            self._push(kept, ttl.total_seconds() / 3)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="housekeeping-renewal", daemon=True)
                self._thread.start()
            self._changed.notify()
        return kept

    def _push(self, kept: Kept, after: float) -> None:
        heapq.heappush(self._due, (time.monotonic() + after, next(self._order), kept))

    def _run(self) -> None:
        while True:
            with self._changed:
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
                kept = heapq.heappop(self._due)[2]
            try:
                after = kept.step()
            except Exception:
                logger.exception("Could not renew %s", kept.name)
                after = 1.0
            if after is not None:
                with self._changed:
                    self._push(kept, after)


renewals: Final = Renewals()
