"""Ticks queued twice under one message id: the copy that is dropped and the key (D1, D4, D5)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import redis
from dramatiq import Actor, Message, MessageProxy

from housekeeping import Settings
from tests.faults import at_step, lose_connection
from tests.integration.middleware.applications import at, queued, wake_up
from tests.integration.middleware.deduplication.deduplicated import declared, executed, executing, fail, keys
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.middleware import DEDUP_STATE, TickStore


@pytest.fixture(params=[executed(), executing()], ids=["until_executed", "until_executing"])
def terms(request: pytest.FixtureRequest) -> dict[str, Any]:
    given: dict[str, Any] = request.param
    return given


def sent_twice(broker: Any) -> None:
    """Enqueue a tick twice: the scheduler could not record that it sent it, so the next minute repeats it."""
    with at_step(TickStore, "record", "before", lose_connection):
        wake_up(broker, at(10))
    wake_up(broker, at(10, 1))


def another_copy(message: MessageProxy) -> Message[Any]:
    """Return the copy that a scheduler enqueues that claimed the tick as well."""
    options = {name: value for name, value in message.options.items() if name != DEDUP_STATE}
    return dataclasses.replace(Message.decode(message.encode()), options={**options, "claim": "another"})


def test_refused_copy_of_a_tick_leaves_the_key_to_the_waiting_one(
    broker: Any, step_worker: StepWorker, runs: list[Any], terms: dict[str, Any]
) -> None:
    # D1, D5
    actor: Actor[..., Any] = declared(broker, runs, schedule="0 * * * *", **terms)
    sent_twice(broker)
    copies = len(queued(broker))

    refused = step_worker.run()
    duplicate = actor.send()

    assert (copies, runs) == (2, [])
    assert duplicate.options.get("duplicate_of") == refused.message_id
    step_worker.run()
    assert runs == [0]


def test_no_copy_of_a_tick_leaves_its_key_behind(
    broker: Any,
    step_worker: StepWorker,
    runs: list[Any],
    terms: dict[str, Any],
    redis_client: redis.Redis,
    settings: Settings,
) -> None:
    # D4: nor does one that was enqueued when the other had ended
    declared(broker, runs, schedule="0 * * * *", **terms)
    sent_twice(broker)
    step_worker.run()
    winner = step_worker.take()
    late = another_copy(winner)
    step_worker.run(winner)
    broker.enqueue(late)

    step_worker.run()

    assert runs == [0]
    assert keys(redis_client, settings) == []


def test_refused_copy_of_a_tick_leaves_the_key_to_a_waiting_retry(
    broker: Any, step_worker: StepWorker, runs: list[Any]
) -> None:
    # D1, D5
    actor: Actor[..., Any] = declared(broker, runs, fail, schedule="0 * * * *", **executed())
    wake_up(broker, at(10))
    winner = step_worker.take()
    broker.enqueue(another_copy(winner))
    step_worker.run(winner)

    step_worker.run()

    assert runs == [0]
    assert actor.send().options.get("duplicate_of") == winner.message_id
