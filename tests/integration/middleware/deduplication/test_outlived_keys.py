"""Keys whose message has ended elsewhere, or while Redis was down (D4, F2): they stop no other message."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.faults import exchanges, instead_of_pauses, lose_connection
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import declared, executed, executing, fail, keys
from tests.integration.middleware.step_worker import StepWorker

PATIENCE_S = 60


def remembered(client: redis.Redis, settings: Settings) -> Callable[[], None]:
    """Return a function that restores the key as it is now, as a failover does that loses later writes."""
    (key,) = keys(client, settings)
    fields: Any = client.hgetall(key)

    def restore() -> None:
        client.hset(key, mapping=fields)
        client.pexpire(key, 60_000)

    return restore


def forget_mark(client: redis.Redis, settings: Settings) -> None:
    """Let the mark of a running message expire."""
    for mark in client.scan_iter(match=f"{settings.namespace}:running:*"):
        client.delete(mark)


@pytest.mark.parametrize("strategy", [executed, executing])
def test_waiting_key_of_an_ended_message_stops_no_other(
    broker: RedisBroker, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings, strategy: Any
) -> None:
    # D4
    work = declared(broker, [], **strategy())
    work.send()
    restore = remembered(redis_client, settings)
    step_worker.run()

    restore()

    following = work.send()
    assert "duplicate_of" not in following.options
    assert work.send().options["duplicate_of"] == following.message_id


def test_key_of_an_ended_run_stops_no_other_message(
    broker: RedisBroker, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings
) -> None:
    # D4
    restores: list[Callable[[], None]] = []
    work = declared(broker, [], lambda: restores.append(remembered(redis_client, settings)), **executed())
    work.send()
    step_worker.run()

    restores[0]()

    assert "duplicate_of" not in work.send().options


def test_key_of_a_second_delivery_is_kept_while_it_runs(
    broker: RedisBroker, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings
) -> None:
    # D4
    duplicates: list[bool] = []

    def acknowledge_elsewhere() -> None:
        name = f"{broker.namespace}:default.msgs"
        broker.client.delete(name)
        duplicates.append("duplicate_of" in work.send().options)
        forget_mark(redis_client, settings)
        duplicates.append("duplicate_of" in work.send().options)

    work = declared(broker, [], acknowledge_elsewhere, **executed())
    work.send()
    step_worker.run()

    assert duplicates == [True, False]


def test_retry_that_is_due_keeps_its_key(broker: RedisBroker, step_worker: StepWorker) -> None:
    # D4
    work = declared(broker, [], fail, **executed(), max_retries=1)
    first = work.send()
    step_worker.run()
    assert work.send().options["duplicate_of"] == first.message_id

    step_worker.come_due()

    assert work.send().options["duplicate_of"] == first.message_id
    assert len(queued(broker)) == 1


@pytest.mark.parametrize("strategy", [executed, executing])
def test_key_of_a_message_that_was_flushed_stops_no_other(broker: RedisBroker, strategy: Any) -> None:
    # D4
    work = declared(broker, [], **strategy())
    work.send()

    broker.flush("default")

    assert "duplicate_of" not in work.send().options


@pytest.mark.parametrize("retried", [False, True])
def test_key_of_a_delayed_message_that_was_flushed_stops_no_other(
    broker: RedisBroker, step_worker: StepWorker, retried: bool
) -> None:
    # D4
    work = declared(broker, [], fail, **executed(including_scheduled=True))
    if retried:
        work.send()
        step_worker.run()
    else:
        work.send_with_options(delay=3_600_000)
    assert "duplicate_of" in work.send().options

    broker.flush("default")

    assert "duplicate_of" not in work.send().options


@pytest.mark.parametrize("fails", [False, True])
def test_end_of_a_message_is_recorded_when_redis_answers_again(
    broker: RedisBroker, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings, fails: bool
) -> None:
    # D4
    runs: list[Any] = []

    def lose_redis() -> None:
        for number in range(1, 4):  # each try of the end
            made.at(made.total + number, "before", lose_connection)
        if fails:
            fail()

    work = declared(broker, runs, lose_redis, **executed(), max_retries=0)
    work.send_with_options(args=(1,), idempotency_key="order-7")
    message = step_worker.fetch()

    with exchanges() as made, instead_of_pauses():
        step_worker.run(message)

    deadline = time.monotonic() + PATIENCE_S
    while keys(redis_client, settings):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    work.send_with_options(args=(1,), idempotency_key="order-7")
    step_worker.run()
    assert runs == ([1, 1] if fails else [1])
