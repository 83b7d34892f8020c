"""Redeliveries, retry storms and messages of other versions at once (F10)."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import declared, executed, executing, fail, keys
from tests.integration.middleware.step_worker import StepWorker, delivered_again
from tests.internals.brokers import as_new

_as_it_stands_in_redis: Final = pytest.mark.redis_broker_only(reason="the message is put into Redis by hand")


class Flaky:
    """Work that fails until the test restores it, and then has one effect."""

    def __init__(self) -> None:
        self.over = False
        self.effects = 0

    def __call__(self) -> None:
        if not self.over:
            fail()
        self.effects += 1


def live(broker: RedisBroker) -> int:
    return len(queued(broker)) + len(queued(broker, "default.DQ"))


def test_retry_storm_of_one_key_keeps_one_message_and_has_one_effect(  # F10, D1
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    flaky = Flaky()
    actor = declared(broker, runs, flaky, **executed())
    most = 0

    for _ in range(40):
        actor.send(7)
        actor.send(project_id=7)
        if message := step_worker.fetch():
            step_worker.run(message)
        most = max(most, live(broker))
        step_worker.come_due()
    flaky.over = True
    while message := step_worker.fetch():
        step_worker.run(message)
        step_worker.run(delivered_again(message))

    assert most == 1
    assert (flaky.effects, live(broker)) == (1, 0)


@pytest.mark.parametrize("terms", [executed(), executing(), {"deduplicate": None}, {"schedule": "* * * * *"}])
def test_redelivered_failed_attempts_leave_one_copy_with_its_key(  # F10, D1, D5, R2
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], terms: dict[str, Any]
) -> None:
    flaky = Flaky()
    actor = declared(broker, runs, flaky, **terms)
    actor.send(7)
    delivered = []

    for _ in range(12):
        message = step_worker.take()
        delivered.append(delivered_again(message))
        step_worker.run(message)
        for attempt in delivered:
            step_worker.run(delivered_again(attempt))
        assert live(broker) == 1
        step_worker.come_due()
    flaky.over = True
    step_worker.run()
    for attempt in delivered:
        step_worker.run(delivered_again(attempt))

    assert len(runs) == 13
    assert (flaky.effects, live(broker)) == (1, 0)


def test_redelivery_keeps_the_mark_of_a_schedules_retry(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    # F10, R2
    actor = declared(broker, runs, fail, schedule="* * * * *", deduplicate=None)
    actor.send()
    step_worker.run()
    step_worker.come_due()
    first_retry = step_worker.take()
    again = delivered_again(first_retry)
    step_worker.run(first_retry)
    step_worker.run(again)

    actor.send()
    step_worker.run()

    assert live(broker) == 1, "one retry waits; the tick that failed beside it is not tried again"


def test_copy_made_by_a_kill_disappears_with_the_next_attempt(  # F10
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], redis_client: redis.Redis, settings: Settings
) -> None:
    declared(broker, runs, fail, **executed()).send(7)
    message = step_worker.take()
    again = delivered_again(message)
    step_worker.run(message)
    # Its process died after its retry was enqueued and before the acknowledgement.
    redis_client.delete(*redis_client.scan_iter(match=f"{settings.namespace}:retried:*", count=1000))
    step_worker.run(again)
    copies = live(broker)

    step_worker.come_due()
    while due := step_worker.fetch():
        step_worker.run(due)

    assert copies == 2
    assert (len(runs), live(broker)) == (3, 1)


def test_requeued_dead_letter_does_not_count_as_an_earlier_attempt(  # F10, R6
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    message = declared(broker, runs, fail, max_retries=1, **executed()).send(7)
    for _ in range(2):
        step_worker.run()
        step_worker.come_due()

    broker.enqueue(as_new(message))
    step_worker.run()

    assert len(runs) == 3


def test_until_executing_retries_that_come_due_together_make_one_run(  # F10, D1
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    flaky = Flaky()
    actor = declared(broker, runs, flaky, **executing())
    for _ in range(30):
        actor.send(7)
        step_worker.run()
    waiting_for_their_time = len(queued(broker, "default.DQ"))
    flaky.over = True

    step_worker.come_due()
    waiting_to_start = len(queued(broker))
    while message := step_worker.fetch():
        step_worker.run(message)

    assert waiting_for_their_time == 30
    assert waiting_to_start == 1
    assert (flaky.effects, live(broker)) == (1, 0)


def test_redeliveries_of_a_completed_message_have_no_effect(  # F10, I1
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], redis_client: redis.Redis, settings: Settings
) -> None:
    declared(broker, runs, **executed()).send(7)
    message = step_worker.run()

    for _ in range(20):
        step_worker.run(delivered_again(message))

    assert runs == [7]
    assert (live(broker), keys(redis_client, settings)) == (0, [])


@_as_it_stands_in_redis
@pytest.mark.parametrize(
    "older",
    [
        {"args": (), "kwargs": {"project_id": 7}},
        {"options": {"from_another_release": {"a": [1]}, "deduplication_standing": "as_it_was_called_then"}},
        {"options": {"retries": 3, "traceback": "Traceback", "requeue_timestamp": 1}},
    ],
)
def test_message_of_another_release_runs_once_and_leaves_no_key(  # F10, D3
    broker: RedisBroker,
    step_worker: StepWorker,
    runs: list[Any],
    redis_client: redis.Redis,
    settings: Settings,
    older: dict[str, Any],
) -> None:
    message = declared(broker, runs, **executed()).message(7)
    older = {**older, "options": {**older.get("options", {}), "redis_message_id": "1"}}
    body = dataclasses.replace(message, **older).encode()
    broker.client.hset(f"{broker.namespace}:default.msgs", "1", body)
    broker.client.rpush(f"{broker.namespace}:default", "1")

    delivered = step_worker.run()
    step_worker.run(delivered_again(delivered))

    assert runs == [7]
    assert (live(broker), keys(redis_client, settings)) == (0, [])


@_as_it_stands_in_redis
def test_message_with_arguments_the_actor_refuses_is_a_dead_letter(  # F10
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    message = declared(broker, runs, **executed()).message(7)
    body = dataclasses.replace(message, args=(1, 2, 3), options={"redis_message_id": "1", "max_retries": 1}).encode()
    broker.client.hset(f"{broker.namespace}:default.msgs", "1", body)
    broker.client.rpush(f"{broker.namespace}:default", "1")

    step_worker.run()
    step_worker.come_due()
    step_worker.run()

    assert runs == []
    assert (live(broker), len(queued(broker, "default.XQ"))) == (0, 1)
