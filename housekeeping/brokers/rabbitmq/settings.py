"""The RabbitMQ broker that the settings name."""

from __future__ import annotations

import logging
from typing import Final

import pika

from housekeeping.brokers.rabbitmq.broker import ReliableRabbitmqBroker
from housekeeping.core.errors import SettingsError
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings

#: Seconds after which either side notices that the other is gone without a word, at the latest after two.
HEARTBEAT_S: Final = 30
#: Seconds that a send waits while RabbitMQ takes nothing, because its memory or disk is full; then it fails.
BLOCKED_S: Final = 30


def rabbitmq_broker(settings: Settings) -> ReliableRabbitmqBroker:
    """A RabbitMQ broker by the settings; it has no middleware yet, and connects with its first message.

    Of several URLs, with a semicolon between them, the nodes of a cluster, the first that answers is taken.

    Raises:
      SettingsError: When no URL is set, or pika cannot read it.
    """
    # What goes wrong is raised to us; pika says it as well, in several lines for each try.
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    urls = (settings.broker_url or "").split(";")
    for url in urls:
        _refuse_unreadable(url)
    broker = ReliableRabbitmqBroker(prefix=f"{settings.namespace}.", url=urls, middleware=[])
    for url, parameters in zip(urls, broker.parameters, strict=True):
        # What the URL says of them wins.
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
