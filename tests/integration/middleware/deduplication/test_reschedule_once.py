"""The single rerun, whatever happens between the end of a run and the release of its key (D8; scenario F6)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import MiddlewareError

from housekeeping import Settings
from tests.faults import (
    Crash,
    Where,
    crash,
    elsewhere,
    exchanges,
    lose_connection,
    start_lost,
)
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import declared, keys
from tests.integration.middleware.ending_badly import ONCE, EndingBadly, run_all
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.brokers import Requeue, SkipEnqueue


def exchanges_of_a_run(step_worker: StepWorker) -> int:
    """Return a worker's exchanges with Redis in one run; RabbitMQ takes the acknowledgement elsewhere."""
    message = step_worker.fetch()
    with exchanges() as made:
        step_worker.run(message)
    return made.total


def test_run_starts_after_every_duplicate_whenever_it_arrives(broker: RedisBroker, step_worker: StepWorker) -> None:
    # F6, D8: at every exchange of the worker with Redis, including its last batch
    sent: list[Message[Any]] = []
    arrived_before_reading: list[int] = []
    work: Actor[..., Any] = declared(broker, [], lambda: arrived_before_reading.append(len(sent)), **ONCE)
    work.send()
    run_all(step_worker)
    work.send()
    usual = exchanges_of_a_run(step_worker)

    for number in range(1, usual + 1):
        work.send()
        message = step_worker.fetch()
        with exchanges() as made:
            made.at(number, "before", elsewhere(lambda: sent.append(work.send())))
            step_worker.run(message)
        run_all(step_worker)

        assert arrived_before_reading[-1] == len(sent), f"no run began after the duplicate at exchange {number}"
    assert len(sent) == usual >= 2, "at each of them one arrived"


#: At the end of a run: release of its key, enqueue of the rerun, completion.
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("where", ["before", "after"])
def test_rerun_is_enqueued_once_whichever_answer_is_lost(
    broker: RedisBroker,
    step_worker: StepWorker,
    redis_client: redis.Redis,
    settings: Settings,
    number: int,
    where: Where,
) -> None:
    # D8
    worker = EndingBadly(broker, step_worker)

    worker.end(number, where, lose_connection)
    run_all(step_worker)

    assert worker.reads == ["read"]
    assert keys(redis_client, settings) == []


def test_rerun_is_enqueued_however_long_redis_is_unavailable(broker: RedisBroker, step_worker: StepWorker) -> None:
    # D8: much longer than an unconfirmed key is kept
    worker = EndingBadly(broker, step_worker)

    worker.end(1, "before", lose_connection, times=50)
    run_all(step_worker)

    assert worker.reads == ["read"]


def test_rerun_is_enqueued_although_redis_came_back_empty(
    broker: RedisBroker, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings
) -> None:
    # D8: a run that lost its key cannot know whether a rerun was requested
    worker = EndingBadly(broker, step_worker)

    def empty() -> None:
        redis_client.delete(*keys(redis_client, settings))

    worker.end(1, "before", elsewhere(empty))
    run_all(step_worker)

    assert worker.reads == ["read"]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("where", ["before", "after"])
def test_rerun_is_enqueued_wherever_the_worker_is_killed_after_its_work(
    broker: RedisBroker,
    step_worker: StepWorker,
    redis_client: redis.Redis,
    settings: Settings,
    number: int,
    where: Where,
) -> None:
    # D8, F6: its message is redelivered and finds the work completed
    worker = EndingBadly(broker, step_worker)
    with pytest.raises(Crash):
        worker.end(number, where, crash)

    worker.completed = True
    for mark in redis_client.scan_iter(match=f"{settings.namespace}:running:*"):
        redis_client.delete(mark)  # it lasts for seconds only
    StepWorker(broker).run(MessageProxy(Message.decode(worker.in_hand)))
    worker.completed = False
    run_all(step_worker)

    assert worker.reads == ["read"]
    assert keys(redis_client, settings) == []


def test_requeued_run_owes_the_rerun_afterwards(broker: RedisBroker, step_worker: StepWorker) -> None:
    # D8: a stopped sweep resumes from its cursor and does not read earlier rows again
    runs: list[str] = []

    def stopped_once() -> None:
        runs.append("run")
        if len(runs) == 1:
            work.send()
            raise Requeue("the process was told to stop")

    work: Actor[..., Any] = declared(broker, [], stopped_once, **ONCE)
    work.send()
    run_all(step_worker)

    assert runs == ["run"] * 3


def too_old(message: MessageProxy, done: str, redis_client: redis.Redis) -> AbstractContextManager[None]:
    message.options["max_age"] = 1
    return nullcontext()


def done_elsewhere(message: MessageProxy, done: str, redis_client: redis.Redis) -> AbstractContextManager[None]:
    redis_client.set(f"{done}:{message.actor_name}:{message.message_id}", message.message_id)
    return nullcontext()


def start_unanswered(message: MessageProxy, done: str, redis_client: redis.Redis) -> AbstractContextManager[None]:
    return start_lost("before")


@pytest.mark.parametrize("ended", [too_old, done_elsewhere, start_unanswered])
def test_requeued_run_that_does_not_continue_is_followed_by_the_rerun(
    broker: RedisBroker, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings, ended: Any
) -> None:
    # D4, D8
    runs: list[str] = []

    def stopped_once() -> None:
        runs.append("run")
        if len(runs) == 1:
            work.send()
            raise Requeue("the process was told to stop")

    work: Actor[..., Any] = declared(broker, [], stopped_once, max_retries=0, **ONCE)
    work.send()
    step_worker.run()
    requeued = step_worker.fetch()

    with ended(requeued, f"{settings.namespace}:done", redis_client):
        step_worker.run(requeued)
    run_all(step_worker)

    assert runs == ["run"] * 2
    assert keys(redis_client, settings) == []


@pytest.mark.parametrize("error", [SkipEnqueue("not_wanted"), MiddlewareError("not this one")])
def test_key_is_released_when_another_middleware_refuses_the_rerun(
    broker: RedisBroker, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings, error: MiddlewareError
) -> None:
    # D4, D8
    class Refusing(Middleware):
        wanted = True

        def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
            if not self.wanted:
                raise error

    refusing = Refusing()
    broker.add_middleware(refusing)

    def duplicate() -> None:
        work.send()
        refusing.wanted = False

    work: Actor[..., Any] = declared(broker, [], duplicate, **ONCE)
    work.send()
    step_worker.run()

    assert keys(redis_client, settings) == []
    assert queued(broker) == []
