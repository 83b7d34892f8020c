"""Bulk enqueue: the promises of `send` for many messages at once (D1, D2, D3, D10)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from housekeeping.core.settings import Settings
from housekeeping.middleware.enqueueing.many import BATCH_SIZE, enqueue_many
from tests.faults import exchanges
from tests.integration.middleware.applications import queued, working
from tests.integration.middleware.enqueue_many.bulked import actor_of, keys
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
        assert done.wait(timeout=20)

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


def test_send_after_a_bulk_is_a_duplicate_of_it(broker: RedisBroker) -> None:  # D1
    work = actor_of(broker, deduplicate="until_executed")
    (bulk,) = enqueue_many(work, [1])

    assert work.send(1).options["duplicate_of"] == bulk.message_id


def test_dropped_message_is_logged_once(broker: RedisBroker, caplog: pytest.LogCaptureFixture) -> None:  # D2
    caplog.set_level(logging.INFO)
    work = actor_of(broker)
    first = work.send(1)

    (second,) = enqueue_many(work, [1])

    (line,) = [record for record in caplog.records if record.message == "Message not enqueued"]
    assert (line.job_status, line.worker) == ("deduplicated", "work")  # type: ignore[attr-defined]
    assert (line.message_id, line.duplicate_of) == (second.message_id, first.message_id)  # type: ignore[attr-defined]


def test_enqueued_message_holds_its_key_for_the_actors_ttl(broker: RedisBroker, settings: Settings) -> None:  # D4
    enqueue_many(actor_of(broker, deduplication={"ttl": timedelta(minutes=20)}), [1, 2])

    left = keys(broker, settings).values()
    assert len(left) == 2
    assert all(19 * 60_000 < ms <= 20 * 60_000 for ms in left)


def test_key_is_released_when_the_message_ends(broker: RedisBroker, settings: Settings) -> None:  # D4
    ended = threading.Event()

    @dramatiq.actor(broker=broker, idempotent=True, deduplicate="until_executed")
    def work(number: int) -> None:
        if number == 9:
            ended.set()

    enqueue_many(work, range(10))
    with working(broker):
        assert ended.wait(timeout=20)

    assert keys(broker, settings) == {}


def test_message_with_dependents_is_never_dropped(broker: RedisBroker) -> None:  # D2
    work = actor_of(broker)
    work.send(1)

    (message,) = enqueue_many(work, [1], on_success="work")

    assert "duplicate_of" not in message.options
    assert len(queued(broker)) == 2


def test_actor_without_deduplication_gets_every_message(broker: RedisBroker, settings: Settings) -> None:
    enqueue_many(actor_of(broker, deduplicate=None), [1, 1])

    assert len(queued(broker)) == 2
    assert keys(broker, settings) == {}


def test_bulk_duplicate_of_a_running_message_requests_a_rerun(broker: RedisBroker) -> None:  # D8
    running, arrived, ran = threading.Event(), threading.Event(), list[int]()
    again = threading.Event()

    @dramatiq.actor(
        broker=broker,
        idempotent=True,
        deduplicate="until_executed",
        deduplication={"if_deduplicated": "reschedule_once"},
    )
    def work(number: int) -> None:
        ran.append(number)
        if len(ran) == 2:
            again.set()
        running.set()
        assert arrived.wait(timeout=20)

    work.send(1)
    with working(broker):
        assert running.wait(timeout=20)
        messages = enqueue_many(work, [1, 1, 1])
        arrived.set()
        assert again.wait(timeout=20)

    assert all("duplicate_of" in message.options for message in messages)
    assert ran == [1, 1]


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


@pytest.mark.parametrize("count", [BATCH_SIZE - 1, BATCH_SIZE, BATCH_SIZE + 1])
def test_any_number_of_messages_is_enqueued(broker: RedisBroker, count: int) -> None:
    messages = enqueue_many(actor_of(broker), range(count))

    assert [message.args for message in messages] == [(number,) for number in range(count)]
    assert len(queued(broker)) == count


def test_delay_is_refused(broker: RedisBroker) -> None:
    with pytest.raises(TypeError, match="send_with_options"):
        enqueue_many(actor_of(broker), [1], delay=1000)


def test_ten_threads_with_equal_calls_enqueue_each_once(broker: RedisBroker) -> None:  # D1
    work = actor_of(broker)
    start, sent = threading.Barrier(10), list[Message[Any]]()

    def send() -> None:
        start.wait(timeout=20)
        sent.extend(enqueue_many(work, range(200)))

    run_in_threads(10, send)

    assert len(sent) == 2000
    assert sum("duplicate_of" not in message.options for message in sent) == 200
    assert sorted(message.args[0] for message in queued(broker)) == list(range(200))


def run_in_threads(count: int, function: Callable[[], None]) -> None:
    threads = [threading.Thread(target=function) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
