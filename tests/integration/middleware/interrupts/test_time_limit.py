"""Time limits of actors in a worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import TimeLimitExceeded

from housekeeping import Settings
from tests.integration.middleware.applications import close_all, eventually, installed, queued, working


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    yield installed(settings.model_copy(update={"database_url": None}))
    close_all()


def test_actor_over_its_time_limit_is_interrupted_and_fails(broker: RedisBroker) -> None:  # B2
    ended: list[type[BaseException]] = []

    @dramatiq.actor(broker=broker, max_retries=0, time_limit=50)
    def endless() -> None:
        never = threading.Event()
        try:
            while not never.wait(0.01):
                pass
        except BaseException as error:
            ended.append(type(error))
            raise

    endless.send()
    with working(broker):
        eventually(lambda: queued(broker, "default.XQ"))

    [dead] = queued(broker, "default.XQ")
    assert ended == [TimeLimitExceeded]
    assert "TimeLimitExceeded" in dead.options["traceback"]
