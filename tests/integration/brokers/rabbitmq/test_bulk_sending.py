"""Bulk sends into a RabbitMQ queue (D6 and D10, for the broker)."""

from __future__ import annotations

import itertools
from typing import Any

import dramatiq
import pytest
from dramatiq import Message
from dramatiq.errors import ConnectionClosed
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import StreamLostError

from housekeeping import enqueue_many
from tests.faults import at_step
from tests.integration.brokers.rabbitmq.conftest import cut
from tests.integration.middleware.applications import queued
from tests.internals.brokers import ReliableRabbitmqBroker
from tests.internals.middleware import BATCH_SIZE


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each answer of RabbitMQ that a channel waited for."""
    waited: list[str] = []
    flush = BlockingChannel._flush_output

    def flush_and_note(self: Any, *waiters: Any) -> None:
        waited.extend(["answer"] * bool(waiters))
        flush(self, *waiters)

    monkeypatch.setattr(BlockingChannel, "_flush_output", flush_and_note)
    return waited


def actor(broker: Any, **options: Any) -> dramatiq.Actor[..., Any]:
    return dramatiq.actor(broker=broker, actor_name="work", **options)(lambda *arguments: None)


def numbers(broker: Any) -> list[Any]:
    return [message.args[0] for message in queued(broker)]


def test_rabbitmq_takes_a_thousand_messages_in_as_many_round_trips_as_one(broker: Any, waits: list[str]) -> None:
    # D10
    work = actor(broker, idempotent=True)
    enqueue_many(work, ["the queue is declared"])

    waits.clear()
    enqueue_many(work, [0])
    for_one = len(waits)
    waits.clear()
    enqueue_many(work, range(1, BATCH_SIZE + 1))

    assert len(waits) == for_one <= 5
    assert len(queued(broker)) == BATCH_SIZE + 2


def test_bulk_over_a_lost_connection_is_repeated(broker: Any) -> None:
    work = actor(broker)
    enqueue_many(work, [1])

    cut(broker.connection)
    enqueue_many(work, [2, 3])

    assert numbers(broker) == [1, 2, 3]


def test_bulk_whose_connection_breaks_half_way_leaves_no_message(broker: Any) -> None:
    # D6
    work = actor(broker)
    enqueue_many(work, [0])
    sent = itertools.count(1)

    def break_off_after_fifty() -> None:
        if next(sent) % 50 == 0:
            cut(broker.connection)
            raise StreamLostError("cut")

    broken_off = at_step(BlockingChannel, "basic_publish", "after", break_off_after_fifty)
    with broken_off, pytest.raises(ConnectionClosed):
        enqueue_many(work, range(1, 101))

    assert next(sent) == 151, "each of three tries had sent half of them"
    assert numbers(broker) == [0]


def test_bulk_recreates_a_deleted_queue(broker: Any) -> None:
    # B2
    work = actor(broker)
    enqueue_many(work, [1])
    broker.channel.queue_delete(broker.physical("default"))

    enqueue_many(work, [2, 3])

    assert numbers(broker) == [2, 3]


def test_priorities_of_messages_are_kept(broker: Any) -> None:
    enqueue_many(actor(broker), [1], broker_priority=3)

    _, properties, _ = broker.channel.basic_get(broker.physical("default"), auto_ack=True)
    assert properties.priority == 3


def test_broker_with_custom_enqueue_gets_each_message(broker: Any) -> None:
    seen: list[Any] = []

    class Own(ReliableRabbitmqBroker):
        def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
            seen.append(message.args[0])
            return super().enqueue(message, delay=delay)

    broker.__class__ = Own
    del broker.enqueue  # the library's method, which wraps the class's
    enqueue_many(actor(broker), [1, 2])

    assert seen == numbers(broker) == [1, 2]
