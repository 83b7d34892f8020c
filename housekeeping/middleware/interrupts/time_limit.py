"""Time limits of actors, which interrupt only the actor's function."""

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
    """Make a `TimeLimit`, Dramatiq's own or an application's, interrupt only inside actors.

    Dramatiq's raises `TimeLimitExceeded` wherever the thread is. After the actor, while the message is acknowledged, it
    ends the thread and leaves the message unacknowledged. While the thread holds the lock of a log handler, it leaves
    the lock held, and all other threads wait forever. Limits, options and the interval stay as they are.
    """
    replace_manager(limits, _Deadlines)
    return limits


class _Deadlines:
    """Deadlines of threads, in place of Dramatiq's manager.

    Parameters:
      interval_s: Time between checks.
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
        """Interrupt every thread that is past its deadline, once."""
        now = time.monotonic()
        # Under the lock, so that no thread starts its next message meanwhile and is interrupted for the last one.
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
