"""Keys and queues on different servers, where no script can change both (D1, D4, D8)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import MiddlewareError

from housekeeping import embedded
from housekeeping.core.settings import Settings
from housekeeping.installation import install
from tests.faults import Crash, crash, exchanges, lose_connection
from tests.integration.middleware.deduplication.deduplicated import declared, executed, fail, keys
from tests.integration.middleware.ending_badly import EndingBadly, run_all
from tests.integration.middleware.step_worker import StepWorker, installed


@pytest.fixture
def apart(settings: Settings) -> Iterator[tuple[RedisBroker, StepWorker]]:
    """Yield a broker with queues and keys on separate servers, and a worker."""
    with (
        embedded.start(postgres=False) as servers,
        installed(settings.model_copy(update={"broker_url": servers.redis_url})) as broker,
    ):
        yield broker, StepWorker(broker)


def test_rerun_is_enqueued_where_keys_and_queue_are_on_different_servers(
    apart: tuple[RedisBroker, StepWorker],
) -> None:
    # D8: its message reaches the broker only at the second attempt
    broker, step_worker = apart
    worker = EndingBadly(broker, step_worker)

    worker.end(2, "before", lose_connection)
    run_all(step_worker)

    assert worker.reads == ["read"]
    assert "duplicate_of" not in worker.work.send().options


def test_rerun_is_owed_until_its_message_is_on_the_other_server(
    apart: tuple[RedisBroker, StepWorker], redis_client: redis.Redis, settings: Settings
) -> None:
    # D8: its worker is killed just before it sends the rerun, and the redelivery finds the work completed
    broker, step_worker = apart
    worker = EndingBadly(broker, step_worker)
    with pytest.raises(Crash):
        worker.end(2, "after", crash)

    worker.completed = True
    for mark in redis_client.scan_iter(match=f"{settings.namespace}:running:*"):
        redis_client.delete(mark)  # it lasts for seconds only
    StepWorker(broker).run(MessageProxy(Message.decode(worker.in_hand)))
    worker.completed = False
    run_all(step_worker)

    assert worker.reads == ["read"]
    assert keys(redis_client, settings) == []


def test_message_that_could_not_be_sent_is_sent_as_new_the_next_time(
    redis_client: redis.Redis, settings: Settings
) -> None:
    # D1: this broker passes the message itself to the hooks; marks of a failed attempt do not apply to the next
    broker = StubBroker(middleware=[])
    install(broker, settings.model_copy(update={"database_url": None}), workers=False)
    work: Actor[..., Any] = declared(broker, [], **executed())
    message = work.message(7)
    with exchanges() as made:
        made.at(1, "before", lose_connection)
        with pytest.raises(MiddlewareError):
            broker.enqueue(message)

    broker.enqueue(message)

    assert work.send(7).options.get("duplicate_of") == message.message_id


def test_retry_outlives_a_sender_that_died_before_superseding_it(  # D6, R4
    apart: tuple[RedisBroker, StepWorker],
) -> None:
    broker, step_worker = apart
    runs: list[Any] = []
    work = declared(
        broker, runs, lambda: fail() if len(runs) == 1 else None, rediscovered=True, min_backoff=3_600_000, **executed()
    )
    work.send()
    step_worker.run()
    with exchanges() as made:
        made.at(1, "after", crash)
        with pytest.raises(Crash):
            work.send()

    step_worker.come_due()
    step_worker.run()

    assert runs == [0, 0]


def test_key_on_other_server_is_free_at_once_when_its_message_is_refused(
    apart: tuple[RedisBroker, StepWorker], redis_client: redis.Redis, settings: Settings
) -> None:
    # D4
    broker, _ = apart

    class Refusing(Middleware):
        def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
            raise MiddlewareError("not this one")

    broker.add_middleware(Refusing())
    work: Actor[..., Any] = declared(broker, [], **executed())

    with pytest.raises(MiddlewareError, match="not this one"):
        work.send()

    assert keys(redis_client, settings) == []
