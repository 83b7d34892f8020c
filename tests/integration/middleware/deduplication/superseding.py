"""An actor whose failed messages wait for hours, until a new message supersedes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import redis
from dramatiq import Actor, Message

from housekeeping import embedded
from housekeeping.core.settings import Settings
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import declared, executed
from tests.integration.middleware.step_worker import StepWorker, installed

HOUR_MS: Final = 3_600_000


class Storage:
    """Work of an actor whose storage is unavailable until the test restores it."""

    def __init__(self) -> None:
        self.away = True
        self.effects = 0

    def __call__(self) -> None:
        if self.away:
            raise RuntimeError("storage away")
        self.effects += 1


@pytest.fixture(params=["keys_with_queue", "keys_elsewhere"])
def broker(request: pytest.FixtureRequest, settings: Settings, redis_client: redis.Redis) -> Iterator[Any]:
    """Return a broker whose queues share the Redis of the keys, and one whose queues do not."""
    if request.param == "keys_with_queue":
        with installed(settings) as broker:
            yield broker
        return
    with (
        embedded.start(postgres=False) as servers,
        installed(settings.model_copy(update={"broker_url": servers.redis_url})) as broker,
    ):
        yield broker


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def actor(broker: Any, runs: list[Any], storage: Storage) -> Actor[..., Any]:
    """Return an actor whose retries wait for an hour or longer."""
    delays = {"min_backoff": 2 * HOUR_MS, "max_backoff": 3 * HOUR_MS}
    return declared(broker, runs, storage, rediscovered=True, **delays, **executed())


def failed(actor: Actor[..., Any], step_worker: StepWorker, **sent: Any) -> Message[Any]:
    """Return a message that waits for its retry."""
    message: Message[Any] = actor.send_with_options(**{"args": (7,), **sent})
    step_worker.run()
    return message


def live(broker: Any) -> tuple[int, int]:
    """Return how many messages wait to start, and how many are delayed."""
    return len(queued(broker)), len(queued(broker, "default.DQ"))


def marks(client: redis.Redis, settings: Settings) -> list[bytes]:
    return list(client.scan_iter(match=f"{settings.namespace}:superseded:*", count=1000))
