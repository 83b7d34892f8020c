"""Messages with equal keys that start or return together (D7, D8), on a real Redis."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import declared, executed, fail, keys
from tests.integration.middleware.step_worker import StepWorker

PATIENCE_S = 60


def test_redelivery_of_the_holder_runs(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], redis_client: redis.Redis, settings: Settings
) -> None:
    # D7: its worker was killed while it ran
    work: Actor[..., Any] = declared(broker, runs, **executed())
    message = work.send()
    (key,) = keys(redis_client, settings)
    redis_client.hset(key, mapping={"state": "running", "run": "of a process that was killed"})

    step_worker.run()

    assert runs == [0]
    assert keys(redis_client, settings) == []
    assert work.send().message_id != message.message_id


def test_message_that_lost_its_key_is_dropped_for_a_waiting_one(
    broker: RedisBroker,
    step_worker: StepWorker,
    runs: list[Any],
    redis_client: redis.Redis,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # D7
    caplog.set_level(logging.INFO)
    work: Actor[..., Any] = declared(broker, runs, **executed())
    work.send()
    redis_client.delete(*keys(redis_client, settings))
    holder = work.send()

    step_worker.run()

    assert runs == []
    assert [message.message_id for message in queued(broker)] == [holder.message_id]
    assert "deduplicated" in [getattr(record, "job_status", None) for record in caplog.records]


def test_message_that_lost_its_key_waits_for_a_reservation_to_expire(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], redis_client: redis.Redis, settings: Settings
) -> None:
    # D6, D7: its key is reserved for a message that is not in the queue yet
    work: Actor[..., Any] = declared(broker, runs, **executed())
    first = work.send()
    (key,) = keys(redis_client, settings)
    redis_client.hset(key, mapping={"id": "of a sender that died", "state": "reserved"})

    step_worker.run()
    redis_client.delete(key)
    step_worker.come_due()

    assert step_worker.run().message_id == first.message_id
    assert runs == [0]


def test_message_that_lost_its_key_waits_for_the_running_one(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], redis_client: redis.Redis, settings: Settings
) -> None:
    # D7: requeued twice while the other one runs, then it runs; no retry is used
    work: Actor[..., Any] = declared(broker, runs, lambda: meanwhile(), **executed())
    first = work.send(1)
    redis_client.delete(*keys(redis_client, settings))
    second = work.send(1)
    late, holder = step_worker.fetch(), step_worker.fetch()
    assert late is not None and holder is not None
    states: list[tuple[int, int]] = []

    def meanwhile() -> None:
        if states:
            return
        for message in (late, None):
            with ThreadPoolExecutor(1) as another:
                another.submit(step_worker.run, message).result(PATIENCE_S)
            states.append((len(queued(broker)), len(queued(broker, "default.DQ"))))
            step_worker.come_due()

    step_worker.run(holder)

    assert holder.message_id == second.message_id
    assert runs == [1]
    assert states == [(1, 1), (1, 1)], "beside the one that runs it is delayed, never dropped"
    last = step_worker.run()
    assert (last.message_id, runs) == (first.message_id, [1, 1])
    assert "retries" not in last.options


def test_duplicates_during_a_run_make_one_rerun(broker: RedisBroker, step_worker: StepWorker, runs: list[Any]) -> None:
    # D8
    sent: list[Message[Any]] = []
    work: Actor[..., Any] = declared(
        broker,
        runs,
        lambda: sent.extend(work.send() for _ in range(3 if not sent else 0)),
        **executed(if_deduplicated="reschedule_once"),
    )

    first = work.send()
    step_worker.run()

    assert [message.options["duplicate_of"] for message in sent] == [first.message_id] * 3
    assert len(queued(broker)) == 1
    step_worker.run()
    assert runs == [0, 0]
    assert queued(broker) == []


def test_duplicate_between_end_and_release_is_not_lost(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    # D8
    work: Actor[..., Any] = declared(broker, runs, **executed(if_deduplicated="reschedule_once"))
    sent: list[Message[Any]] = []

    class SendsAtTheEnd(Middleware):
        def after_process_message(self, broker: Broker, message: MessageProxy, **_: Any) -> None:
            sent.append(work.send())

    broker.middleware.append(SendsAtTheEnd())
    work.send()
    step_worker.run()

    assert "duplicate_of" in sent[0].options
    assert len(queued(broker)) == 1


@pytest.mark.parametrize(("max_retries", "waiting", "delayed"), [(1, 0, 1), (0, 1, 0)])
def test_failed_run_is_followed_by_its_retry_and_a_dead_letter_by_a_rerun(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], max_retries: int, waiting: int, delayed: int
) -> None:
    # D8
    def duplicate_and_fail() -> None:
        if len(runs) == 1:
            work.send()
            fail()

    work: Actor[..., Any] = declared(
        broker, runs, duplicate_and_fail, max_retries=max_retries, **executed(if_deduplicated="reschedule_once")
    )
    work.send()
    step_worker.run()

    assert (len(queued(broker)), len(queued(broker, "default.DQ"))) == (waiting, delayed)
    step_worker.come_due()
    step_worker.run()
    assert runs == [0, 0]
    assert queued(broker) == [], "and no further run"


def test_duplicate_of_a_waiting_message_makes_no_rerun(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    # D8
    work: Actor[..., Any] = declared(broker, runs, **executed(if_deduplicated="reschedule_once"))

    work.send()
    work.send()
    step_worker.run()

    assert queued(broker) == []


def test_retry_dropped_for_a_waiting_message_makes_room_for_its_retry(
    broker: RedisBroker, step_worker: StepWorker
) -> None:
    @dramatiq.actor(broker=broker, schedule="0 0 * * *", idempotent=True)
    def tick() -> None:
        raise ValueError("always")

    tick.send()
    step_worker.run()
    assert len(queued(broker, "default.DQ")) == 1
    second = tick.send()
    step_worker.come_due()

    step_worker.run()

    assert [message.message_id for message in queued(broker, "default.DQ")] == [second.message_id]
