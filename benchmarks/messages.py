"""Messages: the library's middleware against plain Dramatiq with the same broker settings."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import dramatiq
import redis
from dramatiq import Actor, Broker, Worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import default_middleware

import housekeeping
from benchmarks.comparison import Comparison, Contestant, Place
from housekeeping.app import install
from housekeeping.brokers.redis import redis_broker
from housekeeping.core import logs
from housekeeping.core.settings import Settings

_BARE: Final = "bare dramatiq"
_THREADS: Final = 8  # Dramatiq's default
_NAMESPACE: Final = "housekeeping:broker"
LEASE: Final = {"key": lambda number: f"empty/{number}", "ttl": timedelta(minutes=10)}


def bare(place: Place) -> Broker:
    """Return Dramatiq's broker with default middleware and the library's parameters."""
    model = redis_broker(Settings.load(redis_url=place.redis_url))
    return RedisBroker(
        url=place.redis_url,
        namespace=model.namespace,
        maintenance_chance=model.maintenance_chance,
        heartbeat_timeout=model.heartbeat_timeout,
        dead_message_ttl=model.dead_message_ttl,
        middleware=[each() for each in default_middleware if "Prometheus" not in each.__name__],
    )


def whole(place: Place, database_url: str | None = None) -> Broker:
    """Return the library's broker with all middleware, which plain messages need no database for."""
    settings = Settings.load(redis_url=place.redis_url, database_url=database_url, log_level="WARNING")
    logs.configure(settings.log_level, "json")
    broker = redis_broker(settings)
    install(broker, settings, workers=False)
    return broker


def _with_database(place: Place) -> Broker:
    return whole(place, place.database_url)


def actor(broker: Broker, function: Callable[[int], object], **options: Any) -> Actor[..., Any]:
    """Return an actor with these options."""
    made: Actor[..., Any] = dramatiq.actor(broker=broker, actor_name="empty", **options)(function)
    return made


def _actor(broker: Broker, *, fails: bool = False, **options: Any) -> Actor[..., Any]:
    def empty(number: int) -> None:
        if fails:
            raise RuntimeError("as intended")

    return actor(broker, empty, **options)


def _queued(place: Place) -> int:
    """Return the number of running and queued messages."""
    client: Any = redis.Redis.from_url(place.redis_url)
    number = client.hlen(f"{_NAMESPACE}:default.msgs")
    client.close()
    return int(number)


def _enqueue(place: Place) -> None:
    """Enqueue plain messages before the measurement."""
    actor = _actor(bare(place))
    for number in range(place.rows):
        actor.send(number)


def _worked(make: Callable[[Place], Broker], **options: Any) -> Contestant:
    def ready(place: Place) -> Callable[[], object]:
        broker = make(place)
        actor = _actor(broker, **options)
        broker.emit_after("process_boot")
        # The queue is full already. The clock starts with the worker's threads.
        worker = Worker(broker, worker_threads=_THREADS)

        def work() -> None:
            worker.start()
            broker.join(actor.queue_name)

        return work

    return ready


def _sent(make: Callable[[Place], Broker], *, many: bool = False, **options: Any) -> Contestant:
    def ready(place: Place) -> Callable[[], object]:
        broker = make(place)
        actor = _actor(broker, **options)
        broker.client.ping()  # type: ignore[attr-defined]

        def each() -> None:
            for number in range(place.rows):
                actor.send(number)

        return (lambda: housekeeping.enqueue_many(actor, range(place.rows))) if many else each

    return ready


COMPARISONS: Final = (
    Comparison(
        name="messages",
        rounds_at_most=3,
        unit="messages",
        undone=_queued,
        prepare=_enqueue,
        rows=4_000,
        among=4_000,
        contestants={
            _BARE: _worked(bare),
            "whole middleware": _worked(whole),
            "deduplicated": _worked(whole, idempotent=True),
            "under a lease, with a database": _worked(_with_database, exclusive_lease=LEASE),
            "both": _worked(_with_database, idempotent=True, exclusive_lease=LEASE),
        },
        targets={
            "whole middleware": 0.9,
            "deduplicated": 0.8,
            "under a lease, with a database": 0.8,
            "both": 0.7,
        },
    ),
    Comparison(
        name="failing",
        rounds_at_most=3,
        unit="messages",
        undone=_queued,
        prepare=_enqueue,
        rows=2_000,
        among=2_000,
        contestants={
            _BARE: _worked(bare, fails=True, max_retries=0),
            "whole middleware": _worked(whole, fails=True, max_retries=0),
        },
        targets={"whole middleware": 0.9},
    ),
    Comparison(
        name="sending",
        unit="messages",
        undone=lambda place: place.rows - _queued(place),
        rows=10_000,
        among=10_000,
        contestants={
            _BARE: _sent(bare),
            "send": _sent(whole),
            "send, deduplicated": _sent(whole, idempotent=True),
            "enqueue_many": _sent(whole, many=True),
            "enqueue_many, deduplicated": _sent(whole, many=True, idempotent=True),
        },
        targets={"send, deduplicated": 0.9, "enqueue_many, deduplicated": 7},
    ),
)
