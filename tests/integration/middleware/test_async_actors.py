"""Async actors and results of an application that has the library's middleware (docs/howto/existing-application.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import dramatiq
import pytest
import redis
from dramatiq import Broker
from dramatiq.middleware import AsyncIO
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

import housekeeping
from housekeeping import Settings
from tests.integration.middleware.applications import close_all, installed, working
from tests.internals.brokers import message_broker
from tests.internals.database import Database, database

PATIENCE_MS: Final = 60_000


@pytest.fixture(params=["before", "after"])
def broker(
    request: pytest.FixtureRequest, settings: Settings, postgres: Database, redis_client: redis.Redis
) -> Iterator[Broker]:
    """Broker with results and an event loop, which were added before or after the library."""
    added = [Results(backend=RedisBackend(client=redis_client, namespace=f"{settings.namespace}:results")), AsyncIO()]
    if request.param == "after":
        broker: Any = installed(settings)
        for middleware in added:
            broker.add_middleware(middleware)
    else:
        broker = message_broker(settings)
        for middleware in added:
            broker.add_middleware(middleware)
        housekeeping.install(broker, settings, workers=False)
    yield broker
    close_all()


def test_async_actor_has_the_librarys_options_and_a_result(broker: Any) -> None:
    ran = []

    @dramatiq.actor(
        broker=broker,
        store_results=True,
        idempotent=True,
        exclusive_lease={"key": "async", "ttl": timedelta(minutes=1), "fenced": True},
    )
    async def answer(number: int) -> int:
        await asyncio.sleep(0)
        ran.append(number)
        with database.atomic():
            housekeeping.fence()
        return number + 1

    first = answer.send_with_options(args=(1,), idempotency_key="once")
    with working(broker):
        found = first.get_result(backend=broker.get_results_backend(), block=True, timeout=PATIENCE_MS)

    assert (found, ran) == (2, [1])
