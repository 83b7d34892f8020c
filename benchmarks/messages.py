"""Empty messages: all middleware against plain Dramatiq with the same broker settings."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import dramatiq
import redis
from dramatiq import Actor, Broker, Worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import default_middleware
from psycopg2.extensions import connection as Connection

from benchmarks.comparison import Comparison, Contestant, Place, Target
from housekeeping.brokers import redis_broker
from housekeeping.core.settings import Settings
from housekeeping.core.telemetry import logs
from housekeeping.installation import install

BARE: Final = "bare dramatiq"
WHOLE: Final = "whole middleware"
DEDUPLICATED: Final = "deduplicated"
LEASED: Final = "under a lease"
_THREADS: Final = 8  # Dramatiq's default
_NAMESPACE: Final = "housekeeping:broker"
_QUEUE: Final = "default"


def settings_of(place: Place) -> Settings:
    """Return settings without a database, which plain messages do not need."""
    return Settings.load(redis_url=place.redis_url, log_level="WARNING")


def bare(place: Place) -> Broker:
    """Return Dramatiq's broker with default middleware and the library's parameters."""
    model = redis_broker(settings_of(place))
    return RedisBroker(
        url=place.redis_url,
        namespace=model.namespace,
        maintenance_chance=model.maintenance_chance,
        heartbeat_timeout=model.heartbeat_timeout,
        dead_message_ttl=model.dead_message_ttl,
        middleware=[each() for each in default_middleware if "Prometheus" not in each.__name__],
    )


def whole(place: Place) -> Broker:
    """Return the library's broker with all middleware."""
    settings = settings_of(place)
    logs.configure(settings.log_level, "json")
    broker = redis_broker(settings)
    install(broker, settings, workers=False)
    return broker


def empty(broker: Broker, **options: Any) -> Actor[..., Any]:
    """Return an actor that does nothing."""
    declare: Any = dramatiq.actor(broker=broker, actor_name="empty", **options)
    actor: Actor[..., Any] = declare(lambda number: None)
    return actor


def queued(place: Place) -> int:
    """Return the number of running and queued messages."""
    client: Any = redis.Redis.from_url(place.redis_url)
    number = client.hlen(f"{_NAMESPACE}:{_QUEUE}.msgs")
    client.close()
    return int(number)


def without_tables(connection: Connection, rows: int, among: int) -> None:
    """Do nothing, because messages are in Redis."""


def _prepare(place: Place) -> None:
    """Enqueue plain messages before the measurement."""
    actor = empty(bare(place))
    for number in range(place.rows):
        actor.send(number)


def _worked(make: Callable[[Place], Broker], **options: Any) -> Contestant:
    def ready(place: Place) -> Callable[[], object]:
        broker = make(place)
        actor = empty(broker, **options)
        broker.emit_after("process_boot")
        # The queue is full already. The clock starts with the worker's threads.
        worker = Worker(broker, worker_threads=_THREADS)

        def work() -> None:
            worker.start()
            broker.join(actor.queue_name)

        return work

    return ready


_LEASE: Final = {"key": lambda number: f"empty/{number}", "ttl": timedelta(minutes=10)}

COMPARISONS: Final = (
    Comparison(
        name="messages",
        rounds_at_most=3,
        unit="messages",
        template="without_tables",
        fill=without_tables,
        undone=queued,
        prepare=_prepare,
        rows=4_000,
        among=4_000,
        contestants={
            BARE: _worked(bare),
            WHOLE: _worked(whole),
            DEDUPLICATED: _worked(whole, idempotent=True),
            LEASED: _worked(whole, exclusive_lease=_LEASE),
        },
        targets=(Target(WHOLE, BARE, 0.75),),
    ),
)
