"""Shortened waits for processes of the chaos suite, instead of a minute in production."""

from __future__ import annotations

import os
from datetime import timedelta
from types import ModuleType
from typing import Any, Final

from tests.internals.brokers import redis as redis_broker
from tests.internals.ledger import processes, runs, ticks
from tests.internals.middleware import deduplication, delivery, retries

#: Environment variable that shortens the waits.
SHORTENED: Final = "CHAOS_SHORTENED"

#: These waits only add time to a fault. The short values suffice for a busy machine: a slower process counts as
#: dead, which is one more fault and no wrong verdict.
_SHORT: Final[tuple[tuple[ModuleType, str, Any], ...]] = (
    (redis_broker, "HEARTBEAT_TIMEOUT_MS", 2000),
    (processes, "INTERVAL", timedelta(seconds=0.5)),
    (processes, "SILENCE", timedelta(seconds=2)),
    (ticks, "SILENCE", timedelta(seconds=2)),
    (runs, "HEARTBEAT", timedelta(seconds=0.5)),
    (runs, "SILENCE", timedelta(seconds=2)),
    (delivery, "RUNNING_TTL", timedelta(seconds=2)),
    (delivery, "_RUNNING_DELAY", timedelta(seconds=0.5)),
    (deduplication, "_KEY_IN_USE_DELAY", timedelta(seconds=0.5)),
    (retries, "delay_before", lambda retry: timedelta(seconds=0.5)),
)


def shorten_if_asked() -> None:
    """Shorten the waits if asked. Call this before any module copies the values."""
    if SHORTENED not in os.environ:
        return
    for module, name, value in _SHORT:
        getattr(module, name)  # fails if the name no longer exists
        setattr(module, name, value)
