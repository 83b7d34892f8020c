"""Idempotency keys as part of the deduplication key (D3, I3)."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import declared, executed, executing, keys
from tests.integration.middleware.step_worker import StepWorker

STRATEGIES = [executed(), executing(), executed(key=["project_id"]), executed(including_scheduled=True)]


@pytest.mark.parametrize("options", STRATEGIES)
def test_different_idempotency_keys_both_have_an_effect(
    broker: RedisBroker,
    step_worker: StepWorker,
    runs: list[Any],
    redis_client: redis.Redis,
    settings: Settings,
    options: Any,
) -> None:
    work = declared(broker, runs, **options)
    work.send_with_options(args=(7,), idempotency_key="order-1")
    step_worker.run()
    for key in ("order-1", "order-2", None):
        given: dict[str, Any] = {} if key is None else {"idempotency_key": key}
        assert "duplicate_of" not in work.send_with_options(args=(7,), **given).options

    for _ in range(3):
        step_worker.run()

    assert runs == [7, 7, 7]  # order-1 once, order-2, and the message without a key
    assert keys(redis_client, settings) == []


@pytest.mark.parametrize("options", STRATEGIES)
def test_same_idempotency_key_makes_duplicates(broker: RedisBroker, runs: list[Any], options: Any) -> None:
    work = declared(broker, runs, **options)
    first = work.send_with_options(args=(7,), idempotency_key="order-1")

    again = work.send_with_options(args=(7,), idempotency_key="order-1")

    assert again.options["duplicate_of"] == first.message_id
    assert len(queued(broker)) == 1


def test_rerun_keeps_the_idempotency_key(broker: RedisBroker, step_worker: StepWorker, runs: list[Any]) -> None:
    # I3: the duplicate has the key of a message that is completed by then.
    def duplicate() -> None:
        work.send_with_options(args=(7,), idempotency_key="order-1")

    work = declared(broker, runs, duplicate, **executed(if_deduplicated="reschedule_once"))
    work.send_with_options(args=(7,), idempotency_key="order-1")

    step_worker.run()
    step_worker.run()

    assert runs == [7]
    assert queued(broker) == []


def test_failed_message_with_an_idempotency_key_is_retried_beside_another(
    broker: RedisBroker, step_worker: StepWorker
) -> None:
    # R2 covers only messages of a schedule: an application's key means an effect of its own.
    def fail() -> None:
        raise RuntimeError("disk full")

    actor = dramatiq.actor(broker=broker, actor_name="work", idempotent=True, schedule="0 * * * *")(fail)
    actor.send_with_options(idempotency_key="order-1")
    actor.send_with_options(idempotency_key="order-2")

    step_worker.run()
    step_worker.run()

    waiting = [message.options["idempotency_key"] for message in queued(broker, "default.DQ")]
    assert sorted(waiting) == ["order-1", "order-2"]
