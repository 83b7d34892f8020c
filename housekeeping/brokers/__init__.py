"""Message brokers that lose no message to a lost connection: Dramatiq's for Redis and RabbitMQ, made reliable.

Start with `message_broker`, which makes the broker that the settings name, and `harden`, for an application's own
broker. `redis` and `rabbitmq` contain the brokers. `dead_letters` lists and requeues failed messages. `queues` counts
messages.
"""

from __future__ import annotations

import importlib.util

from dramatiq import Broker

from housekeeping.brokers.redis import ReliableRedisBroker, redis_broker
from housekeeping.core.errors import SettingsError
from housekeeping.core.settings import Settings
from housekeeping.core.wording import how_to_install

__all__ = ["ReliableRedisBroker", "harden", "message_broker", "redis_broker", "require_pika"]


def message_broker(settings: Settings) -> Broker:
    """Return the broker that ``HOUSEKEEPING_BROKER_URL`` names, without middleware.

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
        from housekeeping.brokers.rabbitmq.broker import ReliableRabbitmqBroker

        ReliableRabbitmqBroker.adopt(broker)
