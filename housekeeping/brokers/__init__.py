"""Message brokers that lose no message to a lost connection: Dramatiq's for Redis and RabbitMQ, made reliable.

Start with `message_broker`, which makes the broker that the settings name, and `harden`, for an application's own
broker. `redis` and `rabbitmq` contain the brokers and the stores of their dead letters, `dead_letters` what both stores
have in common: the letter, the search, and the change of many. The exceptions of `dramatiq_internals` drop, fail or
requeue a message.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import redis as redis_py
from dramatiq import Broker
from dramatiq.brokers.redis import RedisBroker

from housekeeping.brokers.dead_letters import DeadLetterStore, time_of
from housekeeping.brokers.redis import RedisDeadLetters
from housekeeping.brokers.redis import ReliableRedisBroker as ReliableRedisBroker
from housekeeping.brokers.redis import redis_broker as redis_broker
from housekeeping.core.errors import RedisUnavailable, Refused, SettingsError
from housekeeping.core.logs import how_to_install
from housekeeping.core.redis import redis_client, translate_redis_errors
from housekeeping.core.settings import Settings

#: Dead letters whose actors an alert names.
_LETTERS: Final = 100


def message_broker(settings: Settings) -> Broker:
    """Return the broker that ``HOUSEKEEPING_BROKER_URL`` names, without middleware.

    Raises:
      SettingsError: When no URL is set, its client cannot read it, or RabbitMQ's client is not installed.
    """
    if not settings.on_rabbitmq:
        return redis_broker(settings)
    settings.require_redis_url()
    require_pika()
    from housekeeping.brokers.rabbitmq import rabbitmq_broker

    return rabbitmq_broker(settings)


def require_pika() -> None:
    """Raise SettingsError unless RabbitMQ's client is installed."""
    if importlib.util.find_spec("pika") is None:
        raise SettingsError(
            f"HOUSEKEEPING_BROKER_URL names RabbitMQ, whose client pika is not installed: {how_to_install('rabbitmq')}"
        )


def harden(broker: Broker) -> None:
    """Make an application's broker reliable if it has Dramatiq's own class.

    A Redis broker now does maintenance with each command. A RabbitMQ broker now confirms its sends. Other parameters
    stay.

    Note: A subclass of a Redis broker only gets the maintenance. It may override the methods that would be replaced.
    """
    ReliableRedisBroker.adopt(broker)
    if importlib.util.find_spec("pika") is not None:
        from housekeeping.brokers.rabbitmq import ReliableRabbitmqBroker

        ReliableRabbitmqBroker.adopt(broker)


def dead_letters_of(broker: Broker) -> DeadLetterStore:
    """Return the dead letters of a broker that has the library's middleware.

    Raises:
      Refused: When the dead letters of this kind of broker cannot be listed.
    """
    if isinstance(broker, RedisBroker):
        return RedisDeadLetters(broker)
    if importlib.util.find_spec("pika") is not None:
        from housekeeping.brokers.rabbitmq import RabbitmqDeadLetters, ReliableRabbitmqBroker

        if isinstance(broker, ReliableRabbitmqBroker):
            return RabbitmqDeadLetters(broker)
    raise Refused(f"the dead letters of a {type(broker).__name__} cannot be listed")


@dataclass(frozen=True, slots=True)
class QueueLengths:
    """Numbers of messages of one queue: waiting or running, delayed (including retries), dead.

    Note: On RabbitMQ, running messages and those in workers' memory are not counted.

    Attributes:
      died_at: When the newest dead letter died; None without one, and on RabbitMQ.
      oldest_at: Since when the next message waits for a worker; None if none waits, and on RabbitMQ.
    """

    waiting: int
    delayed: int
    dead: int
    oldest_at: datetime | None = None
    died_at: datetime | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the queue has no messages and no dead letters."""
        return not (self.waiting or self.delayed or self.dead)


def queue_lengths(settings: Settings, names: list[str]) -> dict[str, QueueLengths]:
    """Return the lengths of queues of the ready-made application's broker; at most two round trips on Redis.

    Raises:
      RedisUnavailable: When Redis does not answer.
      BrokerUnavailable: When RabbitMQ does not answer.
      SettingsError: When RabbitMQ's client is not installed.
    """
    if settings.on_rabbitmq:
        require_pika()
        from housekeeping.brokers.rabbitmq import lengths

        return {name: QueueLengths(*numbers) for name, numbers in lengths(settings, names).items()}
    client = redis_client(settings.broker_url or settings.require_redis_url())
    with translate_redis_errors(), client.pipeline(transaction=False) as pipeline:
        for name in names:
            queue = f"{settings.namespace}:broker:{name}"
            pipeline.hlen(f"{queue}.msgs")
            pipeline.hlen(f"{queue}.DQ.msgs")
            pipeline.zcard(f"{queue}.XQ")
            pipeline.lindex(queue, 0)
            pipeline.zrevrange(f"{queue}.XQ", 0, 0, withscores=True)
        found = iter(pipeline.execute())
        numbers = {name: [next(found) for _ in range(5)] for name in names}
        waiting = [name for name, each in numbers.items() if each[3] is not None]
        for name in waiting:
            pipeline.hget(f"{settings.namespace}:broker:{name}.msgs", numbers[name][3])
        oldest = dict(zip(waiting, map(_waiting_since, pipeline.execute()), strict=True)) if waiting else {}
    return {
        name: QueueLengths(live, delayed, dead, oldest.get(name), time_of(last[0][1]) if last else None)
        for name, (live, delayed, dead, _, last) in numbers.items()
    }


def dead_actors(settings: Settings, queue: str) -> Counter[str]:
    """Return the newest dead letters of a queue by actor, at most 100; empty on RabbitMQ, which would deliver them all.

    Raises:
      RedisUnavailable: When Redis does not answer.
    """
    if settings.on_rabbitmq:
        return Counter()
    client = redis_client(settings.broker_url or settings.require_redis_url())
    key = f"{settings.namespace}:broker:{queue}.XQ"
    with translate_redis_errors():
        ids: Any = client.zrevrange(key, 0, _LETTERS - 1)
        bodies: Any = client.hmget(f"{key}.msgs", ids) if ids else []
    found: Counter[str] = Counter()
    for body in bodies:
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            found[str(json.loads(body)["actor_name"])] += 1
    return found


def _waiting_since(body: bytes | None) -> datetime | None:
    """Return when a message was enqueued or its delay ended; None if it cannot be read."""
    try:
        message = json.loads(body or b"")
        return time_of(max(message["message_timestamp"], message["options"].get("eta", 0)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def reach_broker(settings: Settings) -> None:
    """Connect to the servers that a worker needs: the broker's, and Redis.

    Raises:
      RedisUnavailable: When Redis does not answer.
      BrokerUnavailable: When RabbitMQ does not answer.
      SettingsError: When RabbitMQ's client is not installed.
    """
    settings.require_redis_url()
    with translate_redis_errors():
        for client in _redis_clients(settings):
            client.ping()
    if settings.on_rabbitmq:
        queue_lengths(settings, [])


def reject_unusable_redis(settings: Settings) -> None:
    """Check what each Redis is that the settings name; one that does not answer may still come.

    Raises:
      SettingsError: When one is a node of a Redis Cluster, or a Sentinel in the URL of a server.
    """
    for client in _redis_clients(settings):
        with suppress(RedisUnavailable), translate_redis_errors():
            client.ping()


def _redis_clients(settings: Settings) -> Iterator[redis_py.Redis]:
    urls = {settings.redis_url} | ({settings.broker_url} if not settings.on_rabbitmq else set())
    return (redis_client(url) for url in urls if url)
