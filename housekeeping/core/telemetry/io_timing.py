"""How long each thread has waited for the servers, so that a run can say what its time was spent on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """Seconds that a thread has waited: in all, or since an earlier moment.

    Attributes:
      database_s: For PostgreSQL, on the library's own connection: statements, commits, connecting.
      redis_s: For Redis, by clients that `redis_client` made.
    """

    database_s: float = 0.0
    redis_s: float = 0.0

    def since(self, before: WaitTimes) -> WaitTimes:
        """What was added to an earlier reading of the same thread."""
        return WaitTimes(self.database_s - before.database_s, self.redis_s - before.redis_s)

    def as_fields(self) -> dict[str, float]:
        """As a log line has them."""
        return {"db_s": round(self.database_s, 3), "redis_s": round(self.redis_s, 3)}


class _ThreadState(threading.local):
    database = 0.0
    redis = 0.0
    waiting = False


_of_thread: Final = _ThreadState()


def wait_times() -> WaitTimes:
    """What this thread has waited so far."""
    return WaitTimes(_of_thread.database, _of_thread.redis)


@contextmanager
def waiting_for(server: Literal["database", "redis"]) -> Iterator[None]:
    """Count the block's time as waiting for a server; blocks within it are part of it."""
    if _of_thread.waiting:
        yield
        return
    began = time.perf_counter()
    try:
        _of_thread.waiting = True
        yield
    finally:
        _of_thread.waiting = False
        setattr(_of_thread, server, getattr(_of_thread, server) + time.perf_counter() - began)
