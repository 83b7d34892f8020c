"""Dead letters: what only RabbitMQ does. `tests/integration/brokers/dead_letters` has what both brokers promise."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest
from dramatiq import Message
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from housekeeping import Settings
from tests.faults import Crash, at_step, crash
from tests.integration.brokers.rabbitmq.conftest import cut
from tests.integration.middleware.applications import eventually, queued, working
from tests.internals.brokers import (
    DEAD_MESSAGE_TTL_MS,
    DeadLetterStore,
    dead_letters_of,
    message_broker,
    newest,
    requeue,
)
from tests.internals.core import BrokerUnavailable
from tests.rabbitmq_look import bodies
from tests.rabbitmq_server import free_ports


@pytest.fixture
def store(broker: Any) -> DeadLetterStore:
    """Return a store with three dead letters of one actor."""

    @dramatiq.actor(broker=broker, max_retries=0, idempotent=True)
    def failing(number: int) -> None:
        raise ValueError(f"no {number}")

    for number in range(3):
        failing.send(number)
    with working(broker):
        eventually(lambda: len(queued(broker, "default.XQ")) == 3)
    return dead_letters_of(broker)


def test_dead_letters_are_read_without_being_moved(broker: Any, store: DeadLetterStore) -> None:  # R6
    before = bodies(broker, "default.XQ")

    letters = newest(store, 2)

    assert len(letters) == 2
    assert all((letter.error or "").startswith("ValueError: no") for letter in letters)
    assert all(letter.died_at is not None for letter in letters)
    eventually(lambda: store.counts() == {"default": 3})  # a quorum queue has its messages back a moment later
    assert bodies(broker, "default.XQ") == before


def test_letters_are_sent_together_and_not_asked_for_one_by_one(broker: Any, store: DeadLetterStore) -> None:
    asked: list[None] = []
    with at_step(BlockingChannel, "basic_get", "before", lambda: asked.append(None)):
        found = newest(store, 3)

    assert (len(found), len(asked)) == (3, len(broker.get_declared_queues()))


def test_letters_beyond_the_prefetch_of_a_consumer_are_read(
    store: DeadLetterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    basic_qos = BlockingChannel.basic_qos
    monkeypatch.setattr(BlockingChannel, "basic_qos", lambda channel, prefetch_count: basic_qos(channel, 0, 1))

    found = newest(store, 10)

    assert sorted(each.message.args[0] for each in found if each.message) == [0, 1, 2]


@pytest.mark.parametrize(
    ("queue", "arguments"),
    [
        ("default", {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "{}.default.XQ"}),
        ("default.DQ", {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "{}.default.XQ"}),
        ("default.XQ", {"x-message-ttl": DEAD_MESSAGE_TTL_MS}),
    ],
)
def test_quorum_queue_has_no_delivery_limit_that_messages_reach(
    settings: Settings, queue: str, arguments: dict[str, Any]
) -> None:
    # R6: RabbitMQ 4 would delete a dead letter that was read 20 times.
    broker: Any = message_broker(settings.model_copy(update={"rabbitmq_queue_type": "quorum"}))
    broker.declare_queue("default", ensure=True)
    given = {
        name: each.format(settings.namespace) if isinstance(each, str) else each for name, each in arguments.items()
    }

    with pytest.raises(ChannelClosedByBroker, match="'x-delivery-limit'.* current is '2147483647'"):
        broker.channel.queue_declare(
            broker.physical(queue), durable=True, arguments={**given, "x-queue-type": "quorum", "x-delivery-limit": 20}
        )
    broker.close()


def test_requeue_recreates_a_deleted_queue_and_keeps_the_priority(broker: Any) -> None:  # R6
    message: Message[Any] = Message("default", "nobody", (), {}, {"broker_priority": 7})
    broker.declare_queue("default", ensure=True)
    broker.bury("default", message.encode())
    broker.channel.queue_delete(broker.physical("default"))

    requeue(dead_letters_of(broker), [message.message_id])

    _, properties, body = broker.channel.basic_get(broker.physical("default"))
    assert (Message.decode(body).message_id, properties.priority) == (message.message_id, 7)


def test_deleted_dead_letter_queue_hides_no_other(broker: Any, store: DeadLetterStore) -> None:  # R6
    broker.declare_queue("other", ensure=True)
    broker.channel.queue_delete(broker.physical("other.XQ"))

    assert len(newest(store, 10)) == 3


def test_dead_letters_are_read_over_a_new_connection_after_a_loss(  # R6
    broker: Any, store: DeadLetterStore
) -> None:
    cut(broker.connection)

    assert len(newest(store, 10)) == 3


def test_pika_error_is_reported_as_unavailable_rabbitmq(  # R6
    broker: Any, store: DeadLetterStore
) -> None:
    def half_closed() -> None:
        raise AssertionError("half closed")

    unavailable = pytest.raises(BrokerUnavailable, match="did not answer: half closed")
    with at_step(BlockingChannel, "basic_get", "before", half_closed), unavailable:
        newest(store, 10)


def test_unavailable_rabbitmq_is_named_once_without_its_password(settings: Settings) -> None:
    [port] = free_ports(1)
    away = settings.model_copy(update={"broker_url": f"amqp://who:hunter2@127.0.0.1:{port}/"})

    with pytest.raises(BrokerUnavailable) as caught:
        newest(dead_letters_of(message_broker(away)), 10)

    assert str(caught.value).count("RabbitMQ") == 1
    assert "refused" in str(caught.value) and "hunter2" not in str(caught.value)


def test_requeue_that_fails_half_way_leaves_the_letter_in_place(  # R6
    broker: Any, store: DeadLetterStore
) -> None:
    [letter] = newest(store, 1)
    with at_step(BlockingChannel, "tx_commit", "before", crash), pytest.raises(Crash):
        list(store.change_each("requeue", [letter]))

    assert queued(broker) == []
    eventually(lambda: store.counts() == {"default": 3})  # a quorum queue has its messages back a moment later
