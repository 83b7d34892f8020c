"""Threads that act on all renewals of the process when they are due."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from housekeeping.leases.renewal import Renewal, Unfinished, elapsed

logger = logging.getLogger(__name__)

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
