"""Waits that are a minute in production, shortened for a process of the chaos suite."""

from __future__ import annotations

import os
from datetime import timedelta
from types import ModuleType
from typing import Any, Final

from housekeeping.brokers import redis as redis_broker
from housekeeping.middleware import idempotency, retries
from housekeeping.middleware.deduplication import middleware
from housekeeping.sweeps.ledger import runs
from housekeeping.workers.object_storage import upload_stage

#: Environment variable that asks for it.
SHORTENED: Final = "CHAOS_SHORTENED"

#: They add nothing to a fault but time. What is left of each is enough for a busy machine: a process that is slower is
#: taken for dead, which is one fault more, and no wrong verdict.
_SHORT: Final[tuple[tuple[ModuleType, str, Any], ...]] = (
    (redis_broker, "HEARTBEAT_TIMEOUT_MS", 2000),
    (runs, "HEARTBEAT", timedelta(seconds=0.5)),
    (runs, "SILENCE", timedelta(seconds=2)),
    (idempotency, "_RUNNING_TTL", timedelta(seconds=2)),
    (idempotency, "_TURN", timedelta(seconds=0.5)),
    (middleware, "_TURN", timedelta(seconds=0.5)),
    (retries, "delay_before", lambda retry: timedelta(seconds=0.5)),
    (upload_stage, "_GRACE", timedelta(seconds=1)),
)


def shorten_if_asked() -> None:
    """To be called before anything copies these values."""
    if SHORTENED not in os.environ:
        return
    for module, name, value in _SHORT:
        getattr(module, name)  # a name that is no longer there would shorten nothing
        setattr(module, name, value)
