"""Release of deduplication keys when messages end (D4, D5), on a real Redis with Dramatiq's worker code."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import MiddlewareError, SkipMessage

from housekeeping import Settings
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import TTL, declared, executed, executing, fail, keys
from tests.integration.middleware.step_worker import StepWorker, delivered_again
from tests.internals.brokers import as_new
from tests.internals.middleware import DeduplicationKeys

PATIENCE_S = 60


def skipping(broker: RedisBroker) -> None:
    class SkipEverything(Middleware):
        def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
            raise SkipMessage("not today")

    broker.middleware.insert(0, SkipEverything())


def refusing(broker: RedisBroker) -> None:
    class FailEverything(Middleware):
        def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
            raise MiddlewareError("not allowed")

    broker.middleware.insert(0, FailEverything())


def skipping_late(broker: RedisBroker) -> None:
    class SkipEverything(Middleware):
        def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
            raise SkipMessage("not today")

    broker.middleware.append(SkipEverything())


@pytest.mark.parametrize("strategy", ["until_executed", "until_executing"])
@pytest.mark.parametrize(
    ("function", "options", "arrange"),
    [
        pytest.param(None, {}, None, id="done"),
        pytest.param(fail, {"max_retries": 0}, None, id="dead-lettered"),
        pytest.param(fail, {"throws": RuntimeError}, None, id="aborted"),
        pytest.param(None, {"max_age": 1}, None, id="too old"),
        pytest.param(None, {}, skipping, id="skipped before"),
        pytest.param(None, {}, skipping_late, id="skipped after"),
        pytest.param(None, {"max_retries": 0}, refusing, id="refused before"),
    ],
)
def test_key_is_released_however_its_message_ends(
    broker: RedisBroker,
    step_worker: StepWorker,
    redis_client: redis.Redis,
    settings: Settings,
    strategy: str,
    function: Any,
    options: dict[str, Any],
    arrange: Any,
) -> None:
    # D4
    work: Actor[..., Any] = declared(broker, [], function, deduplicate=strategy, **options)
    if arrange is not None:
        arrange(broker)

    broker.enqueue(work.message().copy(message_timestamp=1))
    assert len(keys(redis_client, settings)) == 1
    step_worker.run()

    assert keys(redis_client, settings) == []
    assert "duplicate_of" not in work.send().options


def test_failed_message_without_retry_releases_its_key(broker: RedisBroker, step_worker: StepWorker) -> None:
    # D4: Retries may drop a message without failing or requeueing it
    work: Actor[..., Any] = declared(broker, [], fail, **executed())
    work.send()

    broker.middleware[:] = [each for each in broker.middleware if type(each).__name__ != "Retries"]
    step_worker.run()

    assert "duplicate_of" not in work.send().options


def test_retry_that_never_started_keeps_its_key(broker: RedisBroker, step_worker: StepWorker) -> None:
    # D1: its callback is enqueued after it, in the same hooks
    work: Actor[..., Any] = declared(broker, [], **executed())
    dramatiq.actor(broker=broker, actor_name="tell", idempotent=True)(lambda message, error: None)
    refusing(broker)

    first = work.send_with_options(on_failure="tell")
    step_worker.run()

    assert work.send().options["duplicate_of"] == first.message_id


def test_until_executing_retry_that_never_started_holds_no_key(broker: RedisBroker, step_worker: StepWorker) -> None:
    # D1
    work: Actor[..., Any] = declared(broker, [], **executing())
    refusing(broker)

    first = work.send()
    step_worker.run()
    second = work.send()
    step_worker.come_due()

    assert "duplicate_of" not in second.options
    assert [message.message_id for message in queued(broker)] == [second.message_id] != [first.message_id]


def test_key_of_killed_run_expires(
    broker: RedisBroker, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings
) -> None:
    # D4
    work: Actor[..., Any] = declared(
        broker, [], lambda: seen.extend(map(redis_client.pttl, keys(redis_client, settings))), **executed()
    )
    seen: list[int] = []

    work.send()
    seen.extend(map(redis_client.pttl, keys(redis_client, settings)))
    step_worker.run()

    assert len(seen) == 2
    assert all(500_000 < left <= 600_000 for left in seen)


def test_only_the_run_that_holds_a_key_renews_it(redis_client: redis.Redis, settings: Settings) -> None:
    # D5
    held = DeduplicationKeys(redis_client, settings.namespace)
    name = f"{held.prefix}work:1"
    redis_client.hset(name, mapping={"id": "a", "state": "running", "run": "second"})
    redis_client.pexpire(name, 60_000)

    renewed_by_first, left_ms = held.renew("work:1", "first", TTL), redis_client.pttl(name)

    assert not renewed_by_first and 0 < left_ms <= 60_000
    assert held.renew("work:1", "second", TTL)
    assert redis_client.pttl(name) > 590_000


def test_second_delivery_keeps_the_key_of_the_running_first(broker: RedisBroker, step_worker: StepWorker) -> None:
    # D5
    work: Actor[..., Any] = declared(broker, [], lambda: twice(), **executed())
    dropped: list[Message[Any]] = []

    def twice() -> None:
        with ThreadPoolExecutor(1) as another:
            another.submit(StepWorker(broker).run, second).result(PATIENCE_S)
        dropped.append(work.send())

    first = work.send()
    message = step_worker.take()
    # Too old by now: it is skipped before any middleware learns of the other delivery.
    second = delivered_again(message.copy(message_timestamp=1, options={"max_age": 1}))
    step_worker.run(message)

    assert dropped[0].options.get("duplicate_of") == first.message_id


def test_requeued_dead_letter_claims_its_key_again(
    broker: RedisBroker, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings
) -> None:
    # D1: its key was released when it failed for good
    work: Actor[..., Any] = declared(broker, [], fail, max_retries=0, **executed())
    work.send()
    step_worker.run()
    (dead,) = queued(broker, "default.XQ")

    broker.enqueue(as_new(dead))

    assert len(keys(redis_client, settings)) == 1
    assert work.send().options["duplicate_of"] == dead.message_id
    assert "duplicate_of" in broker.enqueue(as_new(dead.copy(message_id="another"))).options


@pytest.mark.parametrize("retries", [None, 0, 1])  # None: the run does not fail
@pytest.mark.parametrize("kind", ["dedup", "running", "lease"])
def test_message_whose_key_redis_rejects_at_the_end_keeps_no_thread(
    broker: RedisBroker,
    step_worker: StepWorker,
    redis_client: redis.Redis,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    retries: int | None,
) -> None:
    # D4
    def replace_key() -> None:
        [key] = redis_client.keys(f"{settings.namespace}:{kind}:*")
        redis_client.delete(key)
        redis_client.lpush(key, "not the library's")
        if retries is not None:
            fail()

    options: Any = {"exclusive_lease": {"key": "work", "ttl": TTL}, "max_retries": retries or 0, **executed()}
    work: Actor[..., Any] = declared(broker, [], replace_key, **options)
    work.send()
    step_worker.run()

    assert queued(broker) == []
    assert any("WRONGTYPE" in str(vars(each)) for each in caplog.records)
