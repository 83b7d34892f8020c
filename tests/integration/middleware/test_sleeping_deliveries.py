"""Processes that are stopped while their message runs elsewhere, and wake (I1, I2, D5)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Broker, MessageProxy, Middleware

from housekeeping import Settings
from tests.integration.conftest import AddStatuses
from tests.integration.middleware.applications import close_all, installed, queued
from tests.integration.middleware.step_worker import StepWorker, delivered_again
from tests.integration.own_stages import in_transactions
from tests.internals.database import database
from tests.internals.engine import register
from tests.internals.leases import renewal
from tests.internals.workers import status_sweep as sweep

PATIENCE_S = 60
ASLEEP_S = 60.0  # longer than the mark of a running message lasts


class Asleep:
    """Stopped process: time passes, its marks expire, and its message runs elsewhere."""

    def __init__(self, client: redis.Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        self._client = client
        self._marks = f"{settings.namespace}:running:*"
        self._patch = monkeypatch

    def __call__(self, meanwhile: Callable[[], object]) -> None:
        for mark in self._client.scan_iter(match=self._marks, count=1000):
            self._client.delete(mark)
        meanwhile()
        clock = renewal.read_clock
        self._patch.setattr(renewal, "read_clock", lambda: clock() + ASLEEP_S)


class _BeforeTheActor(Middleware):
    """Middleware that calls a function once, after the library's hooks and before the actor."""

    def __init__(self, what: Callable[[], None]) -> None:
        self._left = [what]

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        if self._left:
            self._left.pop()()


@pytest.fixture
def asleep(redis_client: redis.Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Asleep:
    return Asleep(redis_client, settings, monkeypatch)


def test_delivery_that_slept_before_its_actor_does_not_repeat_the_work(  # I1
    broker: Any, step_worker: StepWorker, asleep: Asleep
) -> None:
    runs: list[str] = []

    def work() -> None:
        runs.append("run")

    def delivered_to_another() -> None:
        second.start()
        second.join(PATIENCE_S)

    dramatiq.actor(broker=broker, actor_name="work", idempotent=True, deduplicate=None)(work).send()
    message = step_worker.take()
    second = threading.Thread(target=StepWorker(broker).run, args=[delivered_again(message)])
    broker.add_middleware(_BeforeTheActor(lambda: asleep(delivered_to_another)))

    step_worker.run(message)

    assert runs == ["run"]
    step_worker.come_due()
    while again := step_worker.fetch():
        step_worker.run(again)
    assert (runs, queued(broker), queued(broker, "default.DQ")) == (["run"], [], [])


@pytest.fixture
def working_on_statuses(settings: Settings, statuses: object, redis_client: redis.Redis) -> Iterator[Any]:
    yield installed(settings)
    close_all()


def test_run_that_was_taken_over_leaves_the_completion_to_its_successor(  # I1, F3
    working_on_statuses: Any,
    add_statuses: AddStatuses,
    redis_client: redis.Redis,
    settings: Settings,
) -> None:
    broker, (asleep, awake) = working_on_statuses, (threading.Event(), threading.Event())
    completions: list[list[Any]] = []

    def completed() -> None:
        completions.append(list(redis_client.scan_iter(match=f"{settings.namespace}:done:*", count=1000)))

    def ordered() -> None:
        if threading.current_thread() is not threading.main_thread():
            asleep.set()
            assert awake.wait(PATIENCE_S)
        elif not awake.is_set():
            awake.set()
            first.join(PATIENCE_S)
            completed()

    def sleeping() -> None:
        StepWorker(broker, sweep.queue).run(delivered_again(message))
        database.close()

    add_statuses(5, "now() - interval '1 hour'")
    register(broker, in_transactions(dataclasses.replace(sweep, schedule=None, lease=None), ordered)).send()
    fetched = StepWorker(broker, sweep.queue).fetch()
    assert fetched is not None
    message, first = fetched, threading.Thread(target=sleeping)
    first.start()
    assert asleep.wait(PATIENCE_S)
    for mark in redis_client.scan_iter(match=f"{settings.namespace}:running:*", count=1000):
        redis_client.delete(mark)
    StepWorker(broker, sweep.queue).run(delivered_again(message))
    completed()

    assert [len(there) for there in completions] == [0, 1]
    (put_back,) = queued(broker, f"{sweep.queue}.DQ")
    assert (put_back.message_id, put_back.options.get("retries", 0)) == (message.message_id, 0)
