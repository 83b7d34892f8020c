"""Results of messages that are delivered more than once, by Dramatiq's `Results`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.results import ResultMissing, Results
from dramatiq.results.backends import StubBackend

from housekeeping.brokers import message_broker
from housekeeping.core.redis.client import shared_redis
from housekeeping.core.settings import Settings
from housekeeping.installation import install
from tests.integration.middleware.step_worker import StepWorker, close, delivered_again
from tests.rabbitmq_look import on_rabbitmq, watched

backend = StubBackend()


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[Any]:
    """Yield a broker that stores all results."""
    without = settings.model_copy(update={"database_url": None})
    broker: Any = message_broker(without)
    broker.add_middleware(Results(backend=backend, store_results=True))
    install(broker, without, workers=False)
    if on_rabbitmq(broker):
        watched(broker)
    yield broker
    close(broker)
    shared_redis.get().connection_pool.disconnect()


def run_twice(step_worker: StepWorker) -> None:
    message = step_worker.fetch()
    assert message is not None
    again = delivered_again(message)
    step_worker.run(message)
    step_worker.run(again)


@pytest.mark.parametrize("options", [{}, {"idempotency_key": "k"}])
def test_redelivery_of_a_completed_message_keeps_its_result(  # I1
    broker: Any, step_worker: StepWorker, options: dict[str, Any]
) -> None:
    actor = dramatiq.actor(broker=broker, actor_name="answer", idempotent=True)(lambda: 42)
    message = actor.send_with_options(**options)

    run_twice(step_worker)

    assert backend.get_result(message) == 42


@pytest.mark.parametrize("options", [{}, {"idempotency_key": "k"}])
def test_redelivery_of_a_failed_attempt_leaves_the_result_to_its_retry(  # F10
    broker: Any, step_worker: StepWorker, options: dict[str, Any]
) -> None:
    attempts = iter([ValueError("no")])

    @dramatiq.actor(broker=broker, idempotent=True)
    def answer() -> int:
        for error in attempts:
            raise error
        return 42

    message = answer.send_with_options(**options)
    run_twice(step_worker)

    with pytest.raises(ResultMissing):
        backend.get_result(message)
    step_worker.come_due()
    step_worker.run()
    assert backend.get_result(message) == 42


def test_second_message_with_an_idempotency_key_has_no_result(broker: Any, step_worker: StepWorker) -> None:  # I3
    actor = dramatiq.actor(broker=broker, actor_name="answer", idempotent=True, deduplicate=None)(lambda: 42)
    _, second = (actor.send_with_options(idempotency_key="k") for _ in range(2))

    step_worker.run()
    step_worker.run()

    assert backend.get_result(second) is None
