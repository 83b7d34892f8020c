"""Dramatiq brokers with the library installed, workers and periodiq wake-ups, all in the test's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import dramatiq
import pendulum
import periodiq
import redis
from dramatiq import Actor, Message, Worker
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings, install
from tests import rabbitmq_look
from tests.integration.middleware.step_worker import close
from tests.internals.brokers import message_broker
from tests.internals.core import shared_redis
from tests.internals.database import database
from tests.internals.ledger import Run
from tests.rabbitmq_look import on_rabbitmq, watched

PATIENCE_S = 60.0
_opened: list[Any] = []


def installed(settings: Settings) -> RedisBroker:
    """Yield the ready-made broker without the built-in workers."""
    broker: Any = message_broker(settings)
    install(broker, settings, workers=False)
    assert shared_redis.client is not None
    if on_rabbitmq(broker):
        broker.client = shared_redis.client  # where the keys are
        watched(broker)
    _opened.extend((broker, shared_redis.client))
    installed_broker: RedisBroker = broker  # or RabbitMQ's, with --broker=rabbitmq
    return installed_broker


def close_all() -> None:
    """Close everything that `installed` opened."""
    while _opened:
        opened = _opened.pop()
        opened.close() if isinstance(opened, redis.Redis) else close(opened)
    if database.obj is not None:
        database.close()


def scheduler(settings: Settings, schedule: str = "0 * * * *", **options: Any) -> RedisBroker:
    """Return a scheduler's broker with one scheduled actor, ``swept``."""
    broker = installed(settings)

    @dramatiq.actor(broker=broker, actor_name="swept", schedule=schedule, **options)
    def swept() -> None: ...

    return broker


def at(hour: int, minute: int = 0, second: int = 0) -> datetime:
    """Return a time on the day that the schedule tests use."""
    return datetime(2026, 3, 2, hour, minute, second, tzinfo=UTC)


def ticks(broker: RedisBroker) -> list[str]:
    """Return the ticks of the queued messages as (hour, minute), in order."""
    return sorted(datetime.fromisoformat(m.options["tick"]).strftime("%H:%M") for m in queued(broker))


@contextmanager
def working(broker: RedisBroker, threads: int = 1) -> Iterator[Worker]:
    """Run a worker in threads of this process until the block ends."""
    worker = Worker(broker, worker_timeout=20, worker_threads=threads)
    broker.emit_after("process_boot")
    worker.start()
    try:
        yield worker
    finally:
        worker.stop(timeout=10_000)


def due(broker: RedisBroker, at: datetime) -> list[Actor[..., Any]]:
    """Return the actors for which periodiq would send at this time."""
    return [a for a in broker.actors.values() if "periodic" in a.options and a.options["periodic"].validate(at)]


def wake_up(broker: RedisBroker, at: datetime) -> None:
    """Send like periodiq does once a minute."""
    now = pendulum.instance(at)
    periodiq.Scheduler(list(broker.actors.values())).send_actors(due(broker, now), now)


def queued(broker: RedisBroker, queue: str = "default") -> list[Message[Any]]:
    """Return a queue's messages, running ones included, oldest first; ``default.DQ`` is delayed, ``.XQ`` is dead."""
    if on_rabbitmq(broker):
        return rabbitmq_look.messages(broker, queue)
    bodies: Any = broker.client.hvals(f"{broker.namespace}:{queue}.msgs")
    # Messages of the same millisecond are sorted by their place in the queue: a hash has no order.
    read = broker.client.zrange if queue.endswith(".XQ") else broker.client.lrange
    waiting: Any = read(f"{broker.namespace}:{queue}", 0, -1)
    places = {redis_id.decode(): place for place, redis_id in enumerate(waiting)}
    return sorted(
        (Message.decode(body) for body in bodies),
        key=lambda message: (message.message_timestamp, places.get(message.options.get("redis_message_id", ""), -1)),
    )


def rows(worker: str) -> list[tuple[str, str | None, datetime | None, dict[str, Any]]]:
    """Return outcome, reason, tick and counts of a worker's ledger rows, in order."""
    query = Run.select(Run.outcome, Run.reason, Run.tick, Run.counts).where(Run.worker == worker).order_by(Run.id)
    found: list[Any] = list(query.tuples())
    return found


def eventually(holds: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)
