"""Brokers with nothing left to chance: Redis, and RabbitMQ where it carries the messages."""

from __future__ import annotations

import importlib.util

from dramatiq import Broker

from housekeeping.brokers.redis import ReliableRedisBroker, redis_broker
from housekeeping.core.errors import SettingsError
from housekeeping.core.extras import how_to_install
from housekeeping.core.settings import Settings

__all__ = ["ReliableRedisBroker", "harden", "message_broker", "redis_broker", "require_pika"]


def message_broker(settings: Settings) -> Broker:
    """The broker that ``HOUSEKEEPING_BROKER_URL`` names, on Redis or RabbitMQ; it has no middleware yet.

    Raises:
      SettingsError: When no URL is set, its client cannot read it, or RabbitMQ's client is not installed.
    """
    if not settings.on_rabbitmq:
        return redis_broker(settings)
    settings.require_redis_url()
    require_pika()
    from housekeeping.brokers.rabbitmq.settings import rabbitmq_broker

    return rabbitmq_broker(settings)


def require_pika() -> None:
    """Return when RabbitMQ's client is there.

    Raises:
      SettingsError: When it is not installed.
    """
    if importlib.util.find_spec("pika") is None:
        raise SettingsError(
            f"HOUSEKEEPING_BROKER_URL names RabbitMQ, whose client pika is not installed: {how_to_install('rabbitmq')}"
        )


def harden(broker: Broker) -> None:
    """Give an application's own broker what the library's have, where its class is Dramatiq's own.

    Its parameters stay as they were given, but for maintenance on Redis and confirmed sends on RabbitMQ.

    Note: A subclass keeps its own ways, but for the maintenance: what it overrides may be just what would be replaced.
    """
    ReliableRedisBroker.adopt(broker)
    if importlib.util.find_spec("pika") is not None:
        from housekeeping.brokers.rabbitmq.broker import ReliableRabbitmqBroker

        ReliableRabbitmqBroker.adopt(broker)
