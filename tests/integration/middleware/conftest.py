"""Fixtures of the tests that take a worker's steps one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from housekeeping.foundation.settings import Settings
from tests.integration.middleware.hands import Hands, installed


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    """A broker with the library's middleware and no database."""
    with installed(settings) as broker:
        yield broker


@pytest.fixture
def hands(broker: RedisBroker) -> Hands:
    return Hands(broker)


@pytest.fixture
def runs() -> list[Any]:
    """What the actors of a test did."""
    return []
