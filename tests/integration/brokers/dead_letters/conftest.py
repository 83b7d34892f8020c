"""Fixtures of the dead-letter tests: the broker of ``--broker``, and messages that fail at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor

from housekeeping import Settings
from tests.integration.middleware.step_worker import StepWorker, installed
from tests.internals.brokers import DeadLetterStore, dead_letters_of

#: Declares an actor that fails for good.
Doomed = Callable[..., Actor[..., Any]]


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[Any]:
    with installed(settings) as broker:
        yield broker


@pytest.fixture
def step_worker(broker: Any) -> StepWorker:
    return StepWorker(broker)


@pytest.fixture
def store(broker: Any) -> DeadLetterStore:
    return dead_letters_of(broker)


@pytest.fixture
def doomed(broker: Any) -> Doomed:
    def declare(error: Exception | None = None, name: str = "doomed", **options: Any) -> Actor[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise error or ValueError("disk full")

        return dramatiq.actor(broker=broker, actor_name=name, **{"max_retries": 0, **options})(fail)

    return declare
