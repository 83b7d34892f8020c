"""Queue lengths on Redis or RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

import redis

from housekeeping.brokers import require_pika
from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.redis.client import redis_client, translate_redis_errors
from housekeeping.core.settings import Settings


@dataclass(frozen=True, slots=True)
class QueueLengths:
    """Numbers of messages of one queue: waiting or running, delayed (including retries), dead.

    Note: On RabbitMQ, running messages and those in workers' memory are not counted.
    """

    waiting: int
    delayed: int
    dead: int

    def as_json(self) -> dict[str, int]:
        """Return the lengths of the queue by their names."""
        return asdict(self)


def queue_lengths(settings: Settings, names: list[str]) -> dict[str, QueueLengths]:
    """Return the lengths of queues of the ready-made application's broker; one round trip on Redis.

    Raises:
      RedisUnavailable: When Redis does not answer.
      BrokerUnavailable: When RabbitMQ does not answer.
      SettingsError: When RabbitMQ's client is not installed.
    """
    if settings.on_rabbitmq:
        require_pika()
        from housekeeping.brokers.rabbitmq.queues import lengths

        return {name: QueueLengths(*numbers) for name, numbers in lengths(settings, names).items()}
    client = redis_client(settings.broker_url or settings.require_redis_url())
    with translate_redis_errors(), client.pipeline(transaction=False) as pipeline:
        for name in names:
            queue = f"{settings.namespace}:broker:{name}"
            pipeline.hlen(f"{queue}.msgs")
            pipeline.hlen(f"{queue}.DQ.msgs")
            pipeline.zcard(f"{queue}.XQ")
        numbers = iter(pipeline.execute())
    return {name: QueueLengths(next(numbers), next(numbers), next(numbers)) for name in names}


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


def _redis_clients(settings: Settings) -> Iterator[redis.Redis]:
    urls = {settings.redis_url} | ({settings.broker_url} if not settings.on_rabbitmq else set())
    return (redis_client(url) for url in urls if url)
