"""Ends actors that run for too long, and never anything but their own function."""

from __future__ import annotations

import threading
import time

from dramatiq.middleware import TimeLimit
from dramatiq.middleware.time_limit import TimeLimitExceeded

from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.thread_interrupt import interrupt
from housekeeping.middleware.dramatiq_internals import replace_manager

logger = named_logger(__name__)


def within_actors(limits: TimeLimit) -> TimeLimit:
    """The same middleware, Dramatiq's own or an application's, which interrupts where it does no harm.

    Dramatiq's raises `TimeLimitExceeded` wherever the thread is: also after the actor, while its message is being
    acknowledged, which ends the thread and leaves the message in its hands; or while the lock of a log handler is
    taken, for which all other threads then wait for ever. Limits, options and the interval stay as they are.
    """
    replace_manager(limits, _Deadlines)
    return limits


class _Deadlines:
    """When each thread's message has had its time; takes the place of Dramatiq's manager.

    Parameters:
      interval_s: How often they are looked at.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}

    def start(self) -> None:
        threading.Thread(target=self._run, name="housekeeping-time-limits", daemon=True).start()

    def add_timeout(self, thread_id: int, ttl: float) -> None:
        deadline = time.monotonic() + ttl / 1000
        with self._lock:
            self._deadlines[thread_id] = deadline

    def remove_timeout(self, thread_id: int) -> None:
        with self._lock:
            self._deadlines.pop(thread_id, None)

    def interrupt_late(self) -> None:
        """Interrupt every thread whose time is over, once."""
        now = time.monotonic()
        # Under the lock, so that none of them can begin its next message meanwhile and be ended for the last one's.
        with self._lock:
            late = [thread_id for thread_id, deadline in self._deadlines.items() if deadline <= now]
            interrupted = [thread_id for thread_id in late if interrupt(thread_id, TimeLimitExceeded)]
            for thread_id in late:
                del self._deadlines[thread_id]
        for thread_id in interrupted:
            logger.warning("Actor interrupted at its time limit", thread_id=thread_id)

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_s)
            try:
                self.interrupt_late()
            except Exception:
                logger.exception("Time limits could not be checked")
