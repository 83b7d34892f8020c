"""Keys and queues on different servers, where no script can change both (D1, D4, D8)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import MiddlewareError

from housekeeping import Settings, install
from tests.faults import Crash, crash, exchanges, lose_connection
from tests.integration.middleware.deduplication.deduplicated import declared, executed, keys
from tests.integration.middleware.ending_badly import EndingBadly, run_all
from tests.integration.middleware.step_worker import StepWorker, installed
from tests.internals.embedded import embedded
from tests.internals.middleware import DeduplicationKeys, key_step


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


def test_late_confirmation_changes_nothing(redis_client: redis.Redis, settings: Settings) -> None:
    # D6: the worker started, or has ended, before the sender confirmed; or another message has the key by then
    held = DeduplicationKeys(redis_client, settings.namespace)
    name = f"{held.prefix}work:1"
    step = key_step("claim", "work:1", "a", timedelta(minutes=10), fresh=True)
    held.take(step)
    redis_client.hset(name, mapping={"state": "running", "run": "r"})

    held.confirm(step)
    assert redis_client.hget(name, "state") == b"running"

    redis_client.delete(name)
    held.confirm(step)
    assert not redis_client.exists(name)

    redis_client.hset(name, mapping={"id": "b", "state": "reserved"})
    held.confirm(step)
    assert redis_client.hget(name, "state") == b"reserved"
