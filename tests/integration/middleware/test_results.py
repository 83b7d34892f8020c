"""Results of messages that are dropped or delivered more than once, by Dramatiq's `Results`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Message
from dramatiq.middleware import GroupCallbacks
from dramatiq.middleware.asyncio import AsyncIO
from dramatiq.rate_limits.backends import StubBackend as StubRateLimiter
from dramatiq.results import ResultBackend, ResultFailure, ResultMissing, Results
from dramatiq.results.backends import RedisBackend, StubBackend

import housekeeping
from housekeeping import Settings, install
from tests.faults import exchanges, instead_of_pauses, once
from tests.integration.middleware.applications import working
from tests.integration.middleware.step_worker import StepWorker, close, delivered_again
from tests.internals.brokers import message_broker
from tests.internals.core import shared_redis
from tests.rabbitmq_look import on_rabbitmq, watched


@pytest.fixture(params=["Redis", "in memory"])
def backend(request: pytest.FixtureRequest, settings: Settings, redis_client: redis.Redis) -> ResultBackend:
    namespace = f"{settings.namespace}:results"
    on_redis: ResultBackend = RedisBackend(client=redis_client, namespace=namespace)
    in_memory: ResultBackend = StubBackend(namespace=namespace)
    return on_redis if request.param == "Redis" else in_memory


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis, backend: ResultBackend) -> Iterator[Any]:
    """Yield a broker that stores all results."""
    without = settings.model_copy(update={"database_url": None})
    broker: Any = message_broker(without)
    broker.add_middleware(Results(backend=backend, store_results=True))
    broker.add_middleware(AsyncIO())
    install(broker, without, workers=False)
    if on_rabbitmq(broker):
        watched(broker)
    yield broker
    close(broker)
    shared_redis.get().connection_pool.disconnect()


def forget(backend: Any, message: Message[Any]) -> None:
    """Remove a stored result, as if its ttl were over."""
    key = backend.build_message_key(message)
    if isinstance(backend, RedisBackend):
        backend.client.delete(key)
    else:
        del backend.results[key]


def by_id(message: Message[Any]) -> Message[Any]:
    """Return what a process has that has kept the message's id only."""
    return dataclasses.replace(message, args=(), options={})


def run_twice(step_worker: StepWorker) -> None:
    message = step_worker.take()
    again = delivered_again(message)
    step_worker.run(message)
    step_worker.run(again)


@pytest.mark.parametrize("options", [{}, {"idempotency_key": "k"}])
def test_redelivery_of_a_completed_message_keeps_its_result(  # I1
    broker: Any, step_worker: StepWorker, backend: ResultBackend, options: dict[str, Any]
) -> None:
    actor = dramatiq.actor(broker=broker, actor_name="answer", idempotent=True)(lambda: 42)
    message = actor.send_with_options(**options)

    run_twice(step_worker)

    assert backend.get_result(message) == 42


@pytest.mark.parametrize("options", [{}, {"idempotency_key": "k"}])
def test_redelivery_of_a_failed_attempt_leaves_the_result_to_its_retry(  # F10
    broker: Any, step_worker: StepWorker, backend: ResultBackend, options: dict[str, Any]
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


@pytest.fixture
def answer(broker: Any) -> Any:
    """Return an actor that is sent one message at a time."""
    return dramatiq.actor(broker=broker, actor_name="answer", idempotent=True)(lambda number=42: number)


def sent_twice(answer: Any) -> list[Message[Any]]:
    return [answer.send(), answer.send()]


def sent_in_bulk(answer: Any) -> list[Message[Any]]:
    return housekeeping.enqueue_many(answer, [42, 42])


@pytest.mark.parametrize("send", [sent_twice, sent_in_bulk])
def test_dropped_duplicate_has_the_result_of_the_other_message(  # D2
    answer: Any, step_worker: StepWorker, backend: ResultBackend, send: Callable[[Any], list[Message[Any]]]
) -> None:
    first, second = send(answer)
    with pytest.raises(ResultMissing):
        backend.get_result(second)

    step_worker.run()

    assert second.options["duplicate_of"] == first.message_id
    assert backend.get_result(second) == backend.get_result(by_id(second)) == 42


def test_group_with_a_dropped_duplicate_completes(broker: Any, answer: Any) -> None:  # D2
    group = dramatiq.group([answer.message(1), answer.message(1), answer.message(2)], broker=broker).run()

    with working(broker):
        results = list(group.get_results(block=True, timeout=60_000))

    assert results == [1, 1, 2]


def test_duplicate_of_a_running_async_actor_waits_for_its_result(broker: Any, backend: ResultBackend) -> None:
    started, go_on = threading.Event(), threading.Event()

    @dramatiq.actor(broker=broker, idempotent=True, deduplicate="until_executed")
    async def answer() -> int:
        started.set()
        go_on.wait(60)
        return 42

    answer.send()
    with working(broker):
        assert started.wait(60)
        second = answer.send()
        go_on.set()

        assert backend.get_result(by_id(second), block=True, timeout=60_000) == 42


def test_duplicate_that_asks_for_a_rerun_has_the_running_messages_result(  # D8
    broker: Any, step_worker: StepWorker, backend: ResultBackend
) -> None:
    runs: list[Message[Any]] = []

    @dramatiq.actor(
        broker=broker,
        idempotent=True,
        deduplicate="until_executed",
        deduplication={"if_deduplicated": "reschedule_once"},
    )
    def answer() -> int:
        if not runs:
            runs.append(answer.send())
        else:
            runs.append(runs[0])
        return len(runs)

    first = answer.send()
    step_worker.run()

    assert runs[0].options["duplicate_of"] == first.message_id
    assert backend.get_result(by_id(runs[0])) == 1
    step_worker.run()
    assert len(runs) == 2


def test_duplicate_of_a_dead_letter_fails_with_its_error(
    broker: Any, step_worker: StepWorker, backend: ResultBackend
) -> None:
    @dramatiq.actor(broker=broker, idempotent=True, max_retries=0)
    def answer() -> None:
        raise ValueError("no funds")

    answer.send()
    second = answer.send()
    step_worker.run()

    with pytest.raises(ResultFailure, match="ValueError: no funds"):
        backend.get_result(second, block=True, timeout=600_000)


def test_duplicate_fails_at_once_if_the_result_is_gone(
    answer: Any, step_worker: StepWorker, backend: ResultBackend
) -> None:
    first, second = answer.send(), answer.send()
    step_worker.run()
    forget(backend, first)

    with pytest.raises(ResultFailure, match=f"it equals {first.message_id}, whose result is gone"):
        backend.get_result(by_id(second), block=True, timeout=600_000)


def test_message_that_yields_at_its_delivery_has_the_others_result(  # D7
    answer: Any, step_worker: StepWorker, backend: ResultBackend, redis_client: redis.Redis, settings: Settings
) -> None:
    first = answer.send()
    for key in redis_client.scan_iter(match=f"{settings.namespace}:dedup:*"):
        redis_client.delete(key)  # it waited for longer than the key's ttl
    second = answer.send()

    step_worker.run()
    with pytest.raises(ResultMissing):
        backend.get_result(first)
    step_worker.run()

    assert "duplicate_of" not in second.options
    assert backend.get_result(by_id(first)) == 42


def test_retry_dropped_for_a_waiting_message_has_its_result(  # R4
    broker: Any, step_worker: StepWorker, backend: ResultBackend
) -> None:
    attempts = iter([ValueError("no")])

    @dramatiq.actor(broker=broker, idempotent=True)
    def answer() -> int:
        for error in attempts:
            raise error
        return 42

    first = answer.send()
    step_worker.run()
    answer.send()
    step_worker.come_due()
    step_worker.run()

    assert backend.get_result(by_id(first)) == 42


def test_second_message_with_an_idempotency_key_has_the_first_ones_result(  # I3
    broker: Any, step_worker: StepWorker, backend: ResultBackend
) -> None:
    numbers = iter([1, 2])
    actor = dramatiq.actor(broker=broker, actor_name="count", idempotent=True, deduplicate=None)(lambda: next(numbers))
    _, second = (actor.send_with_options(idempotency_key="k") for _ in range(2))

    step_worker.run()
    with pytest.raises(ResultMissing):
        backend.get_result(second)
    step_worker.run()

    assert backend.get_result(by_id(second)) == 1


def test_second_message_fails_at_once_if_the_first_ones_result_is_gone(  # I3
    broker: Any, step_worker: StepWorker, backend: ResultBackend
) -> None:
    actor = dramatiq.actor(broker=broker, actor_name="answer", idempotent=True, deduplicate=None)(lambda: 42)
    first, second = (actor.send_with_options(idempotency_key="k") for _ in range(2))
    step_worker.run()
    forget(backend, first)
    step_worker.run()

    with pytest.raises(ResultFailure, match=f"message {first.message_id} did the work before"):
        backend.get_result(second, block=True, timeout=600_000)


def test_unavailable_result_backend_costs_the_sender_nothing(
    answer: Any, backend: ResultBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(message_key: str) -> Any:
        raise redis.ConnectionError("no answer")

    first = answer.send()
    monkeypatch.setattr(backend, "build_message_key", refuse)

    second = answer.send()

    assert second.options["duplicate_of"] == first.message_id
    assert "Results of duplicates will be missing" in caplog.text


@pytest.mark.parametrize("place", [0, None])
def test_result_is_stored_before_the_completion(
    settings: Settings, redis_client: redis.Redis, place: int | None
) -> None:
    without = settings.model_copy(update={"database_url": None})
    broker: Any = message_broker(without)
    results = Results(backend=StubBackend(namespace=settings.namespace), store_results=True)
    broker.middleware.insert(len(broker.middleware) if place is None else place, results)

    install(broker, without, workers=False)

    names = [type(each).__name__ for each in broker.middleware]
    assert names.index("Results") > names.index("Admission")  # ``after_`` hooks run in reverse
    close(broker)


@pytest.mark.parametrize("backend", ["Redis"], indirect=True)
@pytest.mark.parametrize("error", [None, ValueError("disk full")])
def test_result_outlives_a_lost_connection_to_its_backend(
    broker: Any, step_worker: StepWorker, backend: ResultBackend, error: Exception | None
) -> None:
    def answer() -> int:
        if error is not None:
            raise error
        return 42

    def lose_connection() -> None:
        raise redis.ConnectionError("connection lost")

    message = dramatiq.actor(broker=broker, actor_name="answer", max_retries=0)(answer).send()
    with exchanges() as made, instead_of_pauses():
        made.whenever(["LPUSH"], "before", once(lose_connection))
        step_worker.run()

    with nullcontext() if error is None else pytest.raises(ResultFailure, match="disk full"):
        assert message.get_result(backend=backend) == 42


@pytest.mark.parametrize("backend", ["Redis"], indirect=True)
def test_duplicates_result_outlives_the_wait_for_the_other_message(
    broker: Any, backend: ResultBackend, redis_client: redis.Redis
) -> None:
    options: dict[str, Any] = {"deduplication": {"ttl": timedelta(hours=2)}, "result_ttl": 60_000}
    actor = dramatiq.actor(broker=broker, actor_name="answer", idempotent=True, **options)(lambda: 42)
    actor.send()
    second = actor.send()

    assert 7_250_000 < redis_client.pttl(backend.build_message_key(second)) <= 7_260_000


@pytest.fixture
def counted(broker: Any) -> Any:
    """Return an actor that counts its runs, and gives the number."""
    numbers = iter([1, 2])
    return dramatiq.actor(broker=broker, actor_name="count", idempotent=True, deduplicate=None)(lambda: next(numbers))


def test_pipe_continues_after_a_message_whose_work_was_done(  # I3
    broker: Any, step_worker: StepWorker, backend: ResultBackend, counted: Any
) -> None:
    receipts: list[int] = []
    receipt: Any = dramatiq.actor(broker=broker, actor_name="receipt")(lambda number: receipts.append(number))
    second = counted.message_with_options(idempotency_key="k")
    counted.send_with_options(idempotency_key="k")
    dramatiq.pipeline([second, receipt.message()], broker=broker).run()

    for _ in range(3):
        step_worker.run()

    assert receipts == [1]
    assert backend.get_result(second) == 1


def test_group_callback_follows_messages_whose_work_was_done(  # I3
    broker: Any, step_worker: StepWorker, counted: Any
) -> None:
    broker.add_middleware(GroupCallbacks(StubRateLimiter()))
    ended: list[str] = []
    finish: Any = dramatiq.actor(broker=broker, actor_name="finish")(lambda: ended.append("all"))
    group = dramatiq.group([counted.message_with_options(idempotency_key="k") for _ in range(2)], broker=broker)
    group.add_completion_callback(finish.message())
    group.run()

    for _ in range(3):
        step_worker.run()

    assert ended == ["all"]
