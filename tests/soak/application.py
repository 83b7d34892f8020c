"""Application of the soak test: actors with every option of the library and almost no work.

Imported by the process that sends and by the worker (``dramatiq tests.soak.application``), which are real ones.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from datetime import timedelta
from typing import Any, Final

import dramatiq
from dramatiq.middleware import CurrentMessage

import housekeeping
from housekeeping import Settings
from tests.internals.brokers import redis_broker
from tests.internals.core import logs, shared_redis
from tests.soak.measured import measured

#: The shortest ttl that the library accepts, so that completions expire during the test.
SHORT: Final = {"ttl": timedelta(seconds=3)}
LEASE: Final = {"key": lambda number: f"soak/{number}", "ttl": timedelta(seconds=3)}

settings: Final = Settings.load()
logs.configure(settings.log_level, settings.log_format)
broker: Final = redis_broker(settings)
broker.add_middleware(CurrentMessage())
sweeps: Final = housekeeping.install(broker, settings)
dramatiq.set_broker(broker)

answers: Final = f"{settings.namespace}:soak:answers"
_ended: Final[Counter[str]] = Counter()
_lock: Final = threading.Lock()


def _count(name: str) -> None:
    with _lock:
        _ended[name] += 1


@dramatiq.actor(idempotent=True, idempotency=SHORT)
def record(number: int) -> None:
    _count("record")


@dramatiq.actor(idempotent=True)
def keep(number: int) -> None:
    """Do nothing. Completions are kept for a day, the default."""
    _count("keep")


@dramatiq.actor(idempotent=True, deduplicate=None)
def charge(number: int) -> None:
    """Count a charge. It is sent twice with one idempotency key."""
    _count("charge")


@dramatiq.actor(idempotent=True, deduplicate="until_executed", idempotency=SHORT)
def refresh(number: int) -> None:
    _count("refresh")


@dramatiq.actor(
    idempotent=True,
    deduplicate="until_executed",
    deduplication={"if_deduplicated": "reschedule_once"},
    idempotency=SHORT,
)
def reindex(number: int) -> None:
    _count("reindex")


@dramatiq.actor(idempotent=True, deduplication={"including_scheduled": True}, idempotency=SHORT)
def remind(number: int) -> None:
    _count("remind")


@dramatiq.actor
def plain(number: int) -> None:
    _count("plain")


@dramatiq.actor(exclusive_lease=LEASE)
def publish(number: int) -> None:
    with housekeeping.ExclusiveLease(f"soak/within/{threading.get_ident()}", timedelta(seconds=3)):
        housekeeping.throttle("soak", 5, timedelta(seconds=1))
    _count("publish")


@dramatiq.actor(exclusive_lease={**LEASE, "if_held": "retry"})
def publish_in_turn(number: int) -> None:
    _count("publish_in_turn")


@dramatiq.actor(
    idempotent=True, deduplicate="until_executed", idempotency=SHORT, max_retries=3, min_backoff=50, max_backoff=100
)
def stumble(number: int) -> None:
    if _retries() < 1:
        raise ValueError(f"{number} fails the first time")
    _count("stumble")


@dramatiq.actor(idempotent=True, idempotency=SHORT)
def come_back(number: int) -> None:
    if _retries() < 1:
        raise dramatiq.Retry(delay=50)
    _count("come_back")


@dramatiq.actor(idempotent=True, deduplicate="until_executed", max_retries=0)
def give_up(number: int) -> None:
    raise ValueError(f"{number} always fails")


@dramatiq.actor(schedule="* * * * *", idempotent=True, max_retries=1, min_backoff=50, max_backoff=100)
def tick() -> None:
    raise ValueError("a schedule that always fails")


@dramatiq.actor
def measure() -> None:
    """Report the resources of this process and the counts of its actors."""
    with _lock:
        ended = dict(_ended)
    shared_redis.get().rpush(answers, json.dumps({"process": measured().as_json(), "ended": ended}))


def _retries() -> int:
    message: Any = CurrentMessage.get_current_message()
    return int(message.options.get("retries", 0))
