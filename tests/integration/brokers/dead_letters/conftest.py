"""Fixtures of the dead-letter tests: a Redis broker, and messages that fail at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.integration.middleware.step_worker import StepWorker, installed
from tests.internals.brokers import RedisDeadLetters

#: Declares an actor that fails for good.
Doomed = Callable[..., Actor[..., Any]]


@pytest.fixture
def broker_url() -> None:
    """Return a Redis broker's URL, with any ``--broker``."""


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    with installed(settings) as broker:
        yield broker


@pytest.fixture
def step_worker(broker: RedisBroker) -> StepWorker:
    return StepWorker(broker)


@pytest.fixture
def store(broker: RedisBroker) -> RedisDeadLetters:
    return RedisDeadLetters(broker)


@pytest.fixture
def doomed(broker: RedisBroker) -> Doomed:
    def declare(error: Exception | None = None, name: str = "doomed", **options: Any) -> Actor[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise error or ValueError("disk full")

        return dramatiq.actor(broker=broker, actor_name=name, **{"max_retries": 0, **options})(fail)

    return declare
