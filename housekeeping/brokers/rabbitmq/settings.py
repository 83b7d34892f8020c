"""The RabbitMQ broker that the settings name."""

from __future__ import annotations

import logging
from typing import Final

import pika

from housekeeping.brokers.rabbitmq.broker import ReliableRabbitmqBroker
from housekeeping.core.errors import SettingsError
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings

#: Heartbeat interval in seconds. Either side notices within two intervals that the other is gone.
HEARTBEAT_S: Final = 30
#: Seconds that a send waits while RabbitMQ blocks publishers, because its memory or disk is full. Then it fails.
BLOCKED_S: Final = 30


def rabbitmq_broker(settings: Settings) -> ReliableRabbitmqBroker:
    """Return the RabbitMQ broker that the settings name, without middleware; it connects with its first message.

    Several URLs, separated by semicolons, are the nodes of a cluster. The first that answers is used.

    Raises:
      SettingsError: When no URL is set, or pika cannot read it.
    """
    # Errors are raised. pika also logs them, in several lines for each attempt.
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    urls = (settings.broker_url or "").split(";")
    for url in urls:
        _refuse_unreadable(url)
    broker = ReliableRabbitmqBroker(
        prefix=f"{settings.namespace}.", queue_type=settings.rabbitmq_queue_type, url=urls, middleware=[]
    )
    for url, parameters in zip(urls, broker.parameters, strict=True):
        # Parameters in the URL win.
        if "heartbeat=" not in url:
            parameters.heartbeat = HEARTBEAT_S
        if "blocked_connection_timeout=" not in url:
            parameters.blocked_connection_timeout = BLOCKED_S
    return broker


def _refuse_unreadable(url: str) -> None:
    try:
        pika.URLParameters(url)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"HOUSEKEEPING_BROKER_URL: pika says: {error_line(error)}") from None
