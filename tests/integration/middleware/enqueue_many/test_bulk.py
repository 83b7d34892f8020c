"""Bulk enqueue: the promises of `send` for many messages at once (D1, D2, D3, D10)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings, enqueue_many
from tests.faults import exchanges
from tests.integration.middleware.applications import queued, working
from tests.integration.middleware.enqueue_many.bulked import actor_of, keys
from tests.internals.middleware import BATCH_SIZE
from tests.rabbitmq_look import on_rabbitmq


@pytest.fixture
def commands() -> Iterator[list[bytes]]:
    """Record each round trip to Redis."""
    with exchanges() as made:
        yield made.commands


def test_each_call_becomes_one_message_in_order(broker: RedisBroker) -> None:
    @dramatiq.actor(broker=broker)
    def copy(source: str, target: str = "there") -> None: ...

    messages = enqueue_many(copy, ["a", ("b", "c"), ["d", "e"]])

    assert [message.args for message in messages] == [("a",), ("b", "c"), ("d", "e")]
    assert {message.message_id for message in queued(broker)} == {message.message_id for message in messages}


def test_no_calls_cost_no_messages_and_no_round_trips(broker: RedisBroker, commands: list[bytes]) -> None:
    assert enqueue_many(actor_of(broker), []) == []
    assert commands == []


def test_bulk_messages_run_in_the_order_of_the_calls(broker: RedisBroker) -> None:
    ran: list[int] = []
    done = threading.Event()

    @dramatiq.actor(broker=broker, idempotent=True)
    def work(number: int) -> None:
        ran.append(number)
        if len(ran) == 50:
            done.set()

    enqueue_many(work, range(50))
    with working(broker):
        assert done.wait(timeout=60)

    assert ran == list(range(50))


def test_bulk_message_equals_that_of_send_but_for_ids_and_time(broker: RedisBroker) -> None:
    work = actor_of(broker)

    sent = work.send_with_options(args=(1,), trigger="parent")
    (bulk,) = enqueue_many(work, [2], trigger="parent")

    ids = ("redis_message_id", "deduplication_key")
    assert {k: v for k, v in sent.options.items() if k not in ids} == {
        k: v for k, v in bulk.options.items() if k not in ids
    }
    assert queued(broker)[1].asdict() == bulk.asdict() | {"args": (2,)}
    assert bulk.options["trigger"] == "parent"


def test_duplicate_call_is_dropped_and_marked(broker: RedisBroker) -> None:  # D2, D3
    work = actor_of(broker)
    first = work.send(number=1)

    messages = enqueue_many(work, [1, 2])

    assert messages[0].options["duplicate_of"] == first.message_id
    assert "duplicate_of" not in messages[1].options
    assert len(queued(broker)) == 2


def test_equal_calls_in_one_bulk_are_enqueued_once(broker: RedisBroker) -> None:  # D1
    messages = enqueue_many(actor_of(broker), [1, 1, 1])

    assert [message.options.get("duplicate_of") for message in messages] == [None] + [messages[0].message_id] * 2
    assert len(queued(broker)) == 1


def test_actor_without_deduplication_gets_every_message(broker: RedisBroker, settings: Settings) -> None:
    enqueue_many(actor_of(broker, deduplicate=None), [1, 1])

    assert len(queued(broker)) == 2
    assert keys(broker, settings) == {}


def test_thousand_messages_cost_as_many_round_trips_as_two(
    broker: RedisBroker, commands: list[bytes]
) -> None:  # D10: a constant number for each batch
    work = actor_of(broker)
    enqueue_many(work, ["scripts are loaded", "and the connection is open"])
    commands.clear()

    enqueue_many(work, [0, -1])
    for_two = len(commands)
    commands.clear()
    enqueue_many(work, range(1, BATCH_SIZE + 1))
    for_a_thousand = len(commands)
    commands.clear()
    enqueue_many(work, range(2 * BATCH_SIZE, 3 * BATCH_SIZE + 2))
    for_two_more = len(commands)

    assert for_a_thousand == for_two <= (4 if on_rabbitmq(broker) else 2)
    assert for_two_more == 2 * for_two


def test_delay_is_refused(broker: RedisBroker) -> None:
    with pytest.raises(TypeError, match="send_with_options"):
        enqueue_many(actor_of(broker), [1], delay=1000)
