"""Fixtures of the Redis broker and helpers that read its queues."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.integration.middleware.applications import close_all, installed


@pytest.fixture
def broker_url() -> None:
    """Return a Redis broker's URL, with any ``--broker``; tests/integration/brokers/rabbitmq covers RabbitMQ."""


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    yield installed(settings.model_copy(update={"database_url": None}))
    close_all()
