"""Time that each thread has waited for PostgreSQL and Redis, so that a run can report it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """Seconds that a thread has waited, in total or since an earlier reading.

    Attributes:
      database_s: For PostgreSQL, on the library's own connection: statements, commits, connecting.
      redis_s: For Redis, by clients of `redis_client`.
    """

    database_s: float = 0.0
    redis_s: float = 0.0

    def since(self, before: WaitTimes) -> WaitTimes:
        """Return the difference to an earlier reading of the same thread."""
        return WaitTimes(self.database_s - before.database_s, self.redis_s - before.redis_s)

    def as_fields(self) -> dict[str, float]:
        """Return the fields of a log line."""
        return {"db_s": round(self.database_s, 3), "redis_s": round(self.redis_s, 3)}


class _ThreadState(threading.local):
    database = 0.0
    redis = 0.0
    waiting = False


_thread_state: Final = _ThreadState()


def wait_times() -> WaitTimes:
    """Return the total wait times of this thread."""
    return WaitTimes(_thread_state.database, _thread_state.redis)


@contextmanager
def waiting_for(server: Literal["database", "redis"]) -> Iterator[None]:
    """Count the time of the block as waiting for a server; nested blocks belong to the outer one."""
    if _thread_state.waiting:
        yield
        return
    began = time.perf_counter()
    try:
        _thread_state.waiting = True
        yield
    finally:
        _thread_state.waiting = False
        setattr(_thread_state, server, getattr(_thread_state, server) + time.perf_counter() - began)
