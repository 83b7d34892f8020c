"""What belongs to the current thread: its message, the time it waited for PostgreSQL and Redis, and its trace span."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

#: Sender of a message: the schedule, application code, a parent worker.
Trigger = Literal["schedule", "enqueue", "parent"]


@dataclass(frozen=True, slots=True)
class MessageContext:
    """The message that the current thread processes.

    Attributes:
      message_id: Dramatiq's id; retries and redeliveries keep it.
      trigger: Its sender.
      tick: Nominal time of its tick; None if it was not scheduled.
      stopping: Set once the worker process is shutting down.
      worker: Name of the actor; None if a test or a tool gave none.
    """

    message_id: str
    trigger: Trigger = "enqueue"
    tick: datetime | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    worker: str | None = None


#: Set by the run log middleware during each message; None on the command line and in other code.
current_message: Final[ContextVar[MessageContext | None]] = ContextVar("current_message", default=None)


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
        """Return the wait times since `before`, an earlier reading of the same thread."""
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


def tracing_api() -> Any:
    """Return the module ``opentelemetry.trace`` if the process has a tracer provider, else None.

    It is never imported here: code that sets up a provider has imported it.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    # While another thread imports the module, it exists without its names.
    if not hasattr(trace, "ProxyTracerProvider") or not hasattr(trace, "get_tracer_provider"):
        return None
    return None if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider) else trace


def tracer() -> Any:
    """Return the library's tracer; None without a tracer provider."""
    trace = tracing_api()
    return None if trace is None else trace.get_tracer_provider().get_tracer("housekeeping")


@contextmanager
def span(name: str) -> Iterator[None]:
    """Give the block a span, below the span of the current message."""
    current = tracer()
    if current is None:
        yield
        return
    with current.start_as_current_span(name):
        yield
