"""Second deliveries while the first one sleeps or Redis loses its mark (I2)."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
import redis

from housekeeping import Settings
from tests.faults import exchanges
from tests.integration.middleware.applications import queued
from tests.integration.middleware.endless import LONG_ENOUGH_S, Endless
from tests.integration.middleware.step_worker import StepWorker, delivered_again
from tests.internals.middleware import delivery

SHORT = timedelta(seconds=3)
PATIENCE_S = 60


@pytest.fixture
def short_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a running mark expire after seconds, so that it is renewed every second."""
    monkeypatch.setattr(delivery, "RUNNING_TTL", SHORT)


@pytest.mark.usefixtures("short_mark")
def test_sleeping_delivery_is_interrupted_when_another_one_runs(
    broker: Any, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings
) -> None:
    # I2: its mark expired while its process was stopped; the next renewal finds that out
    endless, second_may_end, runs = Endless(), threading.Event(), list[int]()

    def work() -> None:
        runs.append(len(runs))
        if runs[-1] == 1:
            second_began.set()
            assert second_may_end.wait(PATIENCE_S)
            return
        (mark,) = redis_client.scan_iter(match=f"{settings.namespace}:running:*", count=1000)
        redis_client.delete(mark)
        second.start()
        assert second_began.wait(PATIENCE_S)
        try:
            endless()
        finally:
            second_may_end.set()

    second_began = threading.Event()
    dramatiq.actor(broker=broker, actor_name="work", idempotent=True, deduplicate=None)(work).send()
    first = step_worker.take()
    second = threading.Thread(target=StepWorker(broker).run, args=[delivered_again(first)])
    step_worker.run(first)
    second.join(PATIENCE_S)

    assert endless.interrupted
    assert runs == [0, 1]
    for _ in range(3):
        step_worker.come_due()
        while (message := step_worker.fetch()) is not None:
            step_worker.run(message)
    assert runs == [0, 1], "and its retry finds the work done"


@pytest.mark.usefixtures("short_mark")
def test_mark_lost_by_redis_is_restored_during_the_run(
    broker: Any, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings
) -> None:
    # I2
    runs: list[str] = []

    def work() -> None:
        runs.append("began")
        pattern = f"{settings.namespace}:running:*"
        (mark,) = redis_client.scan_iter(match=pattern, count=1000)
        redis_client.delete(mark)
        never = threading.Event()
        for _ in range(LONG_ENOUGH_S * 100):
            if redis_client.exists(mark):
                break
            never.wait(0.01)
        second = threading.Thread(target=StepWorker(broker).run, args=[delivered_again(first)])
        second.start()
        second.join(PATIENCE_S)
        runs.append("ended")

    dramatiq.actor(broker=broker, actor_name="work", idempotent=True, deduplicate=None)(work).send()
    fetched = step_worker.take()
    first = fetched
    step_worker.run(first)

    assert runs == ["began", "ended"]


def test_unretried_tick_beside_a_waiting_retry_runs_when_redelivered(broker: Any, step_worker: StepWorker) -> None:
    # I1, S5: its process may have been killed before it recorded the tick's outcome
    runs: list[str] = []

    def work() -> None:
        runs.append("run")
        raise RuntimeError("disk full")

    once: Any = {"schedule": "* * * * *", "idempotent": True, "deduplicate": None}
    actor = dramatiq.actor(broker=broker, actor_name="work", **once)(work)
    actor.send()
    step_worker.run()
    actor.send()
    fetched = step_worker.take()
    again = delivered_again(fetched)  # as it was before its run, which counts its retries

    step_worker.run(fetched)
    step_worker.run(again)

    assert runs == ["run", "run", "run"]
    assert len(queued(broker, "default.DQ")) == 1


@pytest.mark.usefixtures("short_mark")
def test_renewal_during_the_end_of_a_message_leaves_no_mark(
    broker: Any, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings
) -> None:
    # I2: otherwise the retry of a failed message would wait for an ended run
    begun, ended, renewed, runs = threading.Event(), threading.Event(), threading.Event(), list[str]()
    by_worker = threading.get_ident()

    def renew_late() -> None:
        if threading.get_ident() != by_worker:
            begun.set()
            ended.wait(0.5)  # the end waits for the renewal, or is earlier than this

    def answered() -> None:
        if threading.get_ident() != by_worker:
            renewed.set()
        elif begun.is_set():
            ended.set()

    def work() -> None:
        runs.append("run")
        if len(runs) == 1:
            assert begun.wait(PATIENCE_S)
            raise RuntimeError("disk full")

    dramatiq.actor(broker=broker, actor_name="work", idempotent=True, deduplicate=None)(work).send()
    with exchanges(everywhere=True) as made:
        made.whenever([":running:"], "before", renew_late)
        made.whenever([":running:"], "after", answered)
        step_worker.run()
        assert renewed.wait(PATIENCE_S)

    assert list(redis_client.scan_iter(match=f"{settings.namespace}:running:*", count=1000)) == []
    step_worker.come_due()
    step_worker.run()
    assert runs == ["run", "run"]


def test_retry_of_message_completed_elsewhere_keeps_no_key(
    broker: Any, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings
) -> None:
    # D4: its process was disconnected, and another one has completed the work
    runs: list[int] = []

    def work() -> None:
        runs.append(len(runs))
        if runs[-1] == 0:
            for kind in ("running", "dedup"):
                redis_client.delete(*redis_client.scan_iter(match=f"{settings.namespace}:{kind}:*", count=1000))
            assert first is not None
            second = threading.Thread(target=StepWorker(broker).run, args=[delivered_again(first)])
            second.start()
            second.join(PATIENCE_S)
            raise RuntimeError("cut off")

    actor = dramatiq.actor(broker=broker, actor_name="work", idempotent=True, deduplicate="until_executed")(work)
    actor.send()
    first = step_worker.fetch()
    step_worker.run(first)
    assert runs == [0, 1]

    new = actor.send()
    assert "duplicate_of" not in new.options
    step_worker.run()
    assert runs == [0, 1, 2]
    step_worker.come_due()
    while (message := step_worker.fetch()) is not None:
        step_worker.run(message)
    assert runs == [0, 1, 2]
