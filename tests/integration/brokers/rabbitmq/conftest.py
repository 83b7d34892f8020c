"""Fixtures of the RabbitMQ tests, which run with any ``--broker``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
from pika.exceptions import AMQPError

from housekeeping import Settings
from tests.integration.middleware.applications import close_all, installed
from tests.rabbitmq_look import Watched


@pytest.fixture
def broker_url(amqp_url: str) -> str:
    return amqp_url


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[Any]:
    """Return the ready-made broker on RabbitMQ, with the library's middleware and no database."""
    broker: Any = installed(settings.model_copy(update={"database_url": None}))
    yield broker
    close_all()


def cut(connection: Any) -> None:
    """Break a connection like a failing network: neither side is notified."""
    with suppress(AMQPError, OSError):
        connection._impl._transport._sock.shutdown(2)


def running(broker: Watched, queue: str) -> list[Any]:
    """Return the messages of a queue that a worker of this process holds."""
    return [message for name, message in broker.held.values() if name == queue]
