"""Retry counts that callbacks receive, with and without the library's middleware."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Broker
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.integration.middleware.applications import queued
from tests.integration.middleware.step_worker import StepWorker, delivered_again
from tests.sentinel_servers import applications_client

#: Name of a callback and the number of retries in the message that it received.
Seen = list[tuple[str, int | None]]


@pytest.fixture
def bare(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    """Return a broker without the library's middleware."""
    broker = RedisBroker(
        client=applications_client(settings.require_redis_url()), namespace=f"{settings.namespace}:bare"
    )
    yield broker
    broker.client.connection_pool.disconnect()


def seen_by_callbacks(broker: Broker, error: type[Exception], **options: Any) -> Seen:
    """Return the messages that an always failing actor's callbacks receive until the dead letter."""
    seen: Seen = []

    def callback(name: str) -> Callable[..., None]:
        def note(message: dict[str, Any], *_: Any) -> None:
            seen.append((name, message["options"].get("retries")))

        return note

    for name in ("failed", "exhausted"):
        dramatiq.actor(broker=broker, actor_name=name)(callback(name))

    @dramatiq.actor(broker=broker, on_failure="failed", on_retry_exhausted="exhausted", **options)
    def fails() -> None:
        raise error

    step_worker = StepWorker(broker)
    fails.send()
    for _ in range(8):
        while message := step_worker.fetch():
            step_worker.run(message)
        step_worker.come_due()
    return seen


@pytest.mark.parametrize("idempotent", [{}, {"idempotent": True, "deduplicate": "until_executed"}])
@pytest.mark.parametrize("error", [ValueError, KeyError])
@pytest.mark.parametrize("max_retries", [0, 3])
def test_callbacks_see_the_retries_that_bare_dramatiq_counts(
    broker: Any, bare: RedisBroker, max_retries: int, error: type[Exception], idempotent: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"max_retries": max_retries, "throws": KeyError}

    seen = seen_by_callbacks(broker, error, **options, **idempotent)

    assert seen == seen_by_callbacks(bare, error, **options)
    assert len(queued(broker, "default.XQ")) == 1


def test_failed_tick_beside_a_waiting_retry_counts_and_may_be_redelivered(
    broker: Any, step_worker: StepWorker, runs: list[Any]
) -> None:
    seen: list[int] = []
    dramatiq.actor(broker=broker, actor_name="failed")(lambda message, _: seen.append(message["options"]["retries"]))

    @dramatiq.actor(broker=broker, schedule="* * * * *", idempotent=True, on_failure="failed")
    def tick() -> None:
        runs.append(1)
        raise ValueError

    tick.send()
    step_worker.run()
    step_worker.run()
    tick.send()
    beside = step_worker.take()
    again = delivered_again(beside)
    step_worker.run(beside)
    step_worker.run(again)
    while message := step_worker.fetch():
        step_worker.run(message)

    assert (len(runs), seen) == (3, [1, 1, 1]), "no retry of it is in the queue, so its redelivery runs"
