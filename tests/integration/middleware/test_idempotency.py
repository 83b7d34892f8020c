"""Idempotency of messages (I1 to I3), on a real Redis with Dramatiq's worker code."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor, Broker, Message
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.faults import start_lost
from tests.integration.middleware.applications import queued
from tests.integration.middleware.step_worker import StepWorker, delivered_again
from tests.internals.brokers import InvalidOption
from tests.internals.middleware import Admission, Deduplication
from tests.sentinel_servers import applications_client

PATIENCE_S = 60


def declared(
    broker: Broker, runs: list[Any], function: Callable[[], object] = lambda: None, **options: Any
) -> Actor[..., Any]:
    def work(number: int = 0) -> None:
        runs.append(number)
        function()

    return dramatiq.actor(broker=broker, **{"actor_name": "work", "idempotent": True, "deduplicate": None, **options})(
        work
    )


def fail() -> None:
    raise RuntimeError("disk full")


def marks(client: redis.Redis, settings: Settings, kind: str) -> list[bytes]:
    return list(client.scan_iter(match=f"{settings.namespace}:{kind}:*", count=1000))


def test_completed_message_is_not_executed_again(broker: RedisBroker, step_worker: StepWorker, runs: list[Any]) -> None:
    # I1
    work = declared(broker, runs)
    work.send()

    message = step_worker.run()
    step_worker.run(delivered_again(message))

    assert runs == [0]
    assert queued(broker) == queued(broker, "default.DQ") == queued(broker, "default.XQ") == []


@pytest.mark.parametrize(("option", "lives_s"), [({}, 24 * 3600), ({"idempotency": {"ttl": timedelta(hours=1)}}, 3600)])
def test_completion_is_remembered_for_its_ttl(
    broker: RedisBroker,
    step_worker: StepWorker,
    redis_client: redis.Redis,
    settings: Settings,
    option: Any,
    lives_s: int,
) -> None:
    # I1
    declared(broker, [], **option).send()
    step_worker.run()

    (completion,) = marks(redis_client, settings, "done")
    assert lives_s - 60 < redis_client.ttl(completion) <= lives_s
    assert marks(redis_client, settings, "running") == []


def test_failed_message_is_not_completed(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], redis_client: redis.Redis, settings: Settings
) -> None:
    # I1
    work = declared(broker, runs, fail, max_retries=1)
    work.send()

    step_worker.run()
    assert marks(redis_client, settings, "running") == marks(redis_client, settings, "done") == []
    step_worker.come_due()
    step_worker.run()

    assert runs == [0, 0]
    assert marks(redis_client, settings, "done") == []


def test_second_delivery_waits_and_finds_the_work_done(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    # I2
    work = declared(broker, runs, lambda: second())

    def second() -> None:
        if len(runs) > 1:
            return
        with ThreadPoolExecutor(1) as another:
            another.submit(step_worker.run, delivered_again(message)).result(PATIENCE_S)
        (waiting,) = queued(broker, "default.DQ")
        assert (waiting.message_id, waiting.options.get("retries")) == (message.message_id, None)

    work.send()
    fetched = step_worker.take()
    message = fetched
    step_worker.run(message)
    step_worker.come_due()
    step_worker.run()

    assert runs == [0]
    assert queued(broker) == queued(broker, "default.DQ") == queued(broker, "default.XQ") == []


def test_second_delivery_that_comes_due_holds_no_key(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    # D1, I2: it will find its work completed, so a message sent after the first one's start waits separately
    sent: list[Message[Any]] = []
    work = declared(broker, runs, lambda: second(), deduplicate="until_executing")

    def second() -> None:
        if len(runs) > 1:
            return
        with ThreadPoolExecutor(1) as another:
            another.submit(step_worker.run, delivered_again(message)).result(PATIENCE_S)
            another.submit(step_worker.come_due).result(PATIENCE_S)
        sent.append(work.send())

    work.send()
    fetched = step_worker.take()
    message = fetched
    step_worker.run(message)

    assert "duplicate_of" not in sent[0].options
    step_worker.run(), step_worker.run()
    assert runs == [0, 0]


def test_message_of_a_killed_worker_runs_again(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], redis_client: redis.Redis, settings: Settings
) -> None:
    # I2, B1: the mark of a running message expires with its process, before the broker redelivers
    seen: list[int] = []
    work = declared(broker, runs, lambda: seen.extend(map(redis_client.pttl, marks(redis_client, settings, "running"))))

    work.send()
    step_worker.run()

    assert len(seen) == 1
    assert 0 < seen[0] <= 30_000


def test_two_messages_with_an_applications_key_have_one_effect(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    # I3
    work = declared(broker, runs)
    for number in (1, 2):
        work.send_with_options(args=(number,), idempotency_key="注文-7")
    work.send_with_options(args=(3,), idempotency_key="注文-8")
    for number in (4, 5):
        work.send_with_options(args=(number,), idempotency_key=0)

    for _ in range(5):
        step_worker.run()

    assert runs == [1, 3, 4]


def test_applications_key_is_scoped_to_its_actor(broker: RedisBroker, step_worker: StepWorker, runs: list[Any]) -> None:
    # I3
    declared(broker, runs, actor_name="a").send_with_options(args=(1,), idempotency_key="b:c")
    declared(broker, runs, actor_name="a:b").send_with_options(args=(2,), idempotency_key="c")

    step_worker.run(), step_worker.run()

    assert runs == [1, 2]


def test_two_concurrent_messages_with_one_key_have_one_effect(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    # I2, I3
    work = declared(broker, runs, lambda: another_one(), deduplicate="until_executing")

    def another_one() -> None:
        if len(runs) > 1:
            return
        work.send_with_options(args=(2,), idempotency_key="order-7")
        with ThreadPoolExecutor(1) as another:
            another.submit(step_worker.run).result(PATIENCE_S)
        assert [message.args for message in queued(broker, "default.DQ")] == [(2,)]
        # It was requeued before it started, so it holds no key until it is due.
        assert "duplicate_of" not in work.send_with_options(args=(2,), idempotency_key="order-8").options

    work.send_with_options(args=(1,), idempotency_key="order-7")
    step_worker.run()
    step_worker.come_due()

    assert runs == [1]
    step_worker.run(), step_worker.run()
    assert (runs, queued(broker)) == ([1, 2], [])


def test_key_for_an_actor_without_idempotency_is_refused(broker: RedisBroker) -> None:
    # I3
    work = dramatiq.actor(broker=broker, actor_name="work")(lambda: None)

    with pytest.raises(InvalidOption, match="needs an actor with idempotent=True"):
        work.send_with_options(idempotency_key="order-7")


def test_without_redis_nothing_runs_twice(
    broker: RedisBroker,
    step_worker: StepWorker,
    runs: list[Any],
    redis_client: redis.Redis,
    settings: Settings,
) -> None:
    # L5: the mark was made but the answer was lost; the message fails and removes its mark
    work = declared(broker, runs)
    work.send()
    message = step_worker.fetch()

    with start_lost("after"):
        step_worker.run(message)

    assert runs == []
    assert marks(redis_client, settings, "running") == []
    step_worker.come_due()
    step_worker.run()
    assert runs == [0]


def test_actor_without_idempotency_leaves_no_key(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], redis_client: redis.Redis, settings: Settings
) -> None:
    work = declared(broker, runs, idempotent=False)
    work.send()

    message = step_worker.run()
    step_worker.run(delivered_again(message))

    assert runs == [0, 0]
    assert marks(redis_client, settings, "done") == []


def test_client_that_decodes_responses_works(
    settings: Settings, redis_client: redis.Redis, runs: list[Any], broker: RedisBroker, step_worker: StepWorker
) -> None:
    # I1: an application's own client may decode responses
    work = declared(broker, runs)
    client = applications_client(settings.require_redis_url(), decode_responses=True)
    keys = next(each for each in broker.middleware if isinstance(each, Deduplication))
    decoding = Admission(client, settings.namespace, keys)
    broker.middleware[:] = [decoding if isinstance(each, Admission) else each for each in broker.middleware]
    work.send()

    message = step_worker.run()
    step_worker.run(delivered_again(message))
    client.close()

    assert runs == [0]
