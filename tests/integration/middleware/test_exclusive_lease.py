"""Exclusive leases of actors (L1 to L5), on a real Redis with Dramatiq's worker code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor, Broker, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import SkipMessage

from housekeeping import ExclusiveLease, Settings
from tests.faults import Exchanges, exchanges, lose_connection, start_lost
from tests.integration.middleware.applications import queued
from tests.integration.middleware.step_worker import StepWorker

TTL = timedelta(minutes=10)
KEY = "報告/夜"
PATIENCE_S = 60


@pytest.fixture
def held(broker: RedisBroker) -> ExclusiveLease:
    """Hold the lease in the test."""
    lease = ExclusiveLease(KEY, TTL)
    assert lease.try_obtain() is not None
    return lease


def declared(
    broker: Broker, runs: list[Any], function: Callable[[], object] = lambda: None, *, lease: Any = None, **options: Any
) -> Actor[..., Any]:
    def work(number: int = 0) -> None:
        runs.append(number)
        function()

    terms = {"key": KEY, "ttl": TTL, **(lease or {})}
    return dramatiq.actor(broker=broker, actor_name="work", exclusive_lease=terms, **options)(work)


def test_message_is_skipped_while_another_holds_the_lease(
    broker: RedisBroker,
    step_worker: StepWorker,
    runs: list[Any],
    held: ExclusiveLease,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # L1, L4
    caplog.set_level(logging.INFO)
    declared(broker, runs).send()

    message = step_worker.run()

    assert runs == [] and not message.failed
    assert queued(broker) == queued(broker, "default.DQ") == []
    (line,) = [record for record in caplog.records if "lease" in vars(record)]
    said = vars(line)
    assert (line.levelname, said["lease"], said["reason"]) == ("INFO", KEY, "lease_held")
    assert 0 <= said["held_for_s"] < 60
    # The skipped run must not release a lease that it never held.
    assert held.renew()


@pytest.mark.parametrize(("left_ms", "least_ms"), [(60_000, 55_000), (None, 595_000)])
def test_on_conflict_retry_delays_the_message_until_the_lease_expires(
    broker: RedisBroker,
    step_worker: StepWorker,
    runs: list[Any],
    held: ExclusiveLease,
    redis_client: redis.Redis,
    settings: Settings,
    left_ms: int | None,
    least_ms: int,
) -> None:
    # L4: after a ttl at the latest
    if left_ms is not None:
        redis_client.pexpire(f"{settings.namespace}:lease:{KEY}", left_ms)
    declared(broker, runs, lease={"if_held": "retry"}, max_retries=0).send()

    put_back_at = step_worker.run().message_timestamp

    (waiting,) = queued(broker, "default.DQ")
    assert least_ms < waiting.options["eta"] - put_back_at < min((left_ms or 600_000) + 5_000, 605_000)
    assert "retries" not in waiting.options
    held.cancel()
    step_worker.come_due()
    step_worker.run()
    assert runs == [0]


def fail() -> None:
    raise RuntimeError("disk full")


@pytest.mark.parametrize("function", [lambda: None, fail])
def test_lease_is_held_during_the_run_and_released_however_it_ends(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], function: Callable[[], object]
) -> None:
    # L1
    lease = ExclusiveLease(KEY, TTL)

    def work() -> None:
        runs.append(lease.try_obtain())
        function()

    declared(broker, [], work, max_retries=0).send()
    step_worker.run()

    assert runs == [None]
    assert lease.try_obtain() is not None


def test_lease_is_released_when_a_later_middleware_drops_the_message(
    broker: RedisBroker, step_worker: StepWorker
) -> None:
    # L1
    class DropEverything(Middleware):
        def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
            raise SkipMessage

    broker.middleware.append(DropEverything())
    declared(broker, []).send()
    step_worker.run()

    assert not ExclusiveLease(KEY, TTL).exists()


def test_lease_is_released_when_another_middleware_fails_the_message_at_last(
    broker: RedisBroker, step_worker: StepWorker
) -> None:
    # L1
    class FailEverything(Middleware):
        def after_process_message(self, broker: Broker, message: MessageProxy, **_: Any) -> None:
            message.fail()

    broker.middleware.insert(0, FailEverything())
    declared(broker, []).send()

    assert step_worker.run().failed
    assert not ExclusiveLease(KEY, TTL).exists()


def test_thread_forgets_its_lease_after_the_run(
    broker: RedisBroker, step_worker: StepWorker, caplog: pytest.LogCaptureFixture
) -> None:
    dramatiq.actor(broker=broker, actor_name="plain")(lambda: None)
    declared(broker, []).send()
    step_worker.run()
    held = ExclusiveLease(KEY, TTL)
    held.try_obtain()

    broker.actors["plain"].send()
    step_worker.run()

    assert held.renew()
    assert "lost" not in caplog.text


def test_lease_whose_release_got_no_answer_does_not_count_as_lost(
    broker: RedisBroker, step_worker: StepWorker, caplog: pytest.LogCaptureFixture
) -> None:
    # L2: the repeated release finds it free
    made: list[Exchanges] = []

    def lose_the_next_answer() -> None:
        for each in made:
            each.at(each.total + 1, "after", lose_connection)

    work = declared(broker, [], lose_the_next_answer)
    work.send()
    step_worker.run()  # Redis has the scripts from now on
    work.send()
    message = step_worker.fetch()

    with exchanges() as counted:
        made.append(counted)
        step_worker.run(message)

    assert "lost" not in caplog.text
    assert ExclusiveLease(KEY, TTL).try_obtain() is not None


def test_lease_key_from_arguments_ignores_how_they_are_passed(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    # L1
    ExclusiveLease("project/1", TTL).try_obtain()
    work = declared(broker, runs, lease={"key": lambda number: f"project/{number}"})

    work.send(1)
    work.send(number=1)
    work.send(2)
    work.send()
    for _ in range(4):
        step_worker.run()

    assert runs == [2, 0]


@pytest.mark.parametrize("key", [lambda number: 1 // number, lambda number: None, lambda number: ""])
def test_message_whose_lease_key_fails_does_not_run(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], key: Callable[..., object]
) -> None:
    # L5
    declared(broker, runs, lease={"key": key}, max_retries=0).send()

    assert step_worker.run().failed
    assert runs == []


def test_without_redis_the_message_fails_is_retried_and_does_not_run(
    broker: RedisBroker,
    step_worker: StepWorker,
    runs: list[Any],
    held: ExclusiveLease,
) -> None:
    # L5
    declared(broker, runs).send()
    message = step_worker.fetch()

    with start_lost("before"):
        step_worker.run(message)

    assert runs == []
    assert [message.options.get("retries") for message in queued(broker, "default.DQ")] == [1]


def test_unexpected_error_does_not_run_the_message_unprotected(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    # L5, L6: Dramatiq would log the error and run the actor
    declared(broker, runs, max_retries=0).send()
    message = step_worker.take()

    with exchanges() as made:
        made.at(1, "before", fail)
        step_worker.run(message)

    assert message.failed
    assert runs == []


def test_of_many_concurrent_messages_one_runs(broker: RedisBroker, runs: list[Any]) -> None:
    # L1
    def others() -> None:
        if len(runs) > 1:
            return
        with ThreadPoolExecutor(4) as threads:
            for message in messages[1:]:
                threads.submit(StepWorker(broker).run, message).result(PATIENCE_S)

    work = declared(broker, runs, others)
    for number in range(4):
        work.send(number)
    step_worker = StepWorker(broker)
    messages = [message for _ in range(4) if (message := step_worker.fetch()) is not None]
    step_worker.run(messages[0])

    assert runs == [0]
