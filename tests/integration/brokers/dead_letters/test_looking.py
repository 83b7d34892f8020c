"""Listing and lookup of dead letters."""

from __future__ import annotations

import json
from typing import Any

import dramatiq
import pika
import pytest
from dramatiq import Message
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import current_millis

from tests.integration.brokers.dead_letters.conftest import Doomed
from tests.integration.middleware.applications import eventually, working
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.brokers import DeadLetterStore, dead_letters_of, find, newest, requeue
from tests.internals.core import Refused
from tests.rabbitmq_look import on_rabbitmq


class _MayNot(Exception):
    """Error for which the actor declares no retry."""


def bury(broker: Any, body: bytes, broker_id: str = "5-5", queue: str = "default", died_at: int | None = None) -> None:
    """Add these to the dead letters, in the form that the broker stores; RabbitMQ has whole seconds."""
    died_at = died_at or current_millis()
    if on_rabbitmq(broker):
        broker.declare_queue(queue, ensure=True)
        properties = pika.BasicProperties(message_id=broker_id, timestamp=died_at // 1000)
        broker.channel.basic_publish("", broker.physical(f"{queue}.XQ"), body, properties)
        return
    broker.client.zadd(f"{broker.namespace}:{queue}.XQ", {broker_id: died_at})
    broker.client.hset(f"{broker.namespace}:{queue}.XQ.msgs", broker_id, body)


@pytest.mark.parametrize(
    ("error", "options", "said"),
    [
        (ValueError("disk full"), {}, "ValueError: disk full"),
        (ValueError("row 7\nof a table\n  ^"), {}, "ValueError: row 7"),
        (_MayNot("no"), {"throws": _MayNot, "max_retries": 3}, "_MayNot: no"),
    ],
)
def test_dead_letter_names_its_error(  # R6
    doomed: Doomed,
    step_worker: StepWorker,
    store: DeadLetterStore,
    error: Exception,
    options: dict[str, Any],
    said: str,
) -> None:
    doomed(error, **options).send()

    step_worker.run()

    [letter] = newest(store, 10)
    assert letter.error is not None and letter.error.endswith(said)
    assert letter.retries == 0


def test_dead_letter_names_its_last_error_and_number_of_retries(  # R6
    broker: Any, step_worker: StepWorker, store: DeadLetterStore
) -> None:
    errors = iter(["the first", "the second", "the last"])

    @dramatiq.actor(broker=broker, max_retries=2)
    def fails() -> None:
        raise ValueError(next(errors))

    fails.send()
    for _ in range(2):
        step_worker.run()
        step_worker.come_due()
    step_worker.run()

    [letter] = newest(store, 10)
    assert (letter.error, letter.retries) == ("ValueError: the last", 2)


def test_message_of_an_unknown_actor_is_marked_as_such(  # R6
    broker: Any, doomed: Doomed, store: DeadLetterStore
) -> None:
    message = doomed().send()
    del broker.actors["doomed"]

    with working(broker):
        eventually(lambda: newest(store, 1))

    [letter] = newest(store, 10)
    assert letter.id == message.message_id
    assert letter.error is not None and "ActorNotFound: doomed; the worker process that took it" in letter.error


def test_newest_letters_of_all_queues_come_first_up_to_the_limit(  # R6
    doomed: Doomed, broker: Any, store: DeadLetterStore
) -> None:
    doomed(name="doomed")
    an_hour_ago = current_millis() - 3_600_000
    for number in range(240):  # more than a page for each queue
        queue = ("default", "other")[number % 2]
        body = Message(queue, "doomed", (number,), {}, {}).encode()
        bury(broker, body, str(number), queue, died_at=an_hour_ago + number * 1000)

    numbers = [letter.message.args[0] for letter in newest(store, 230) if letter.message]
    assert numbers == list(range(239, 9, -1))
    assert store.counts() == {"default": 120, "other": 120}


def test_letters_are_found_by_message_id_and_by_broker_id(  # R6
    doomed: Doomed, broker: Any, step_worker: StepWorker, store: DeadLetterStore
) -> None:
    actor = doomed()
    sent = [actor.send(number) for number in range(2)]
    for _ in sent:
        step_worker.run()
    for number in range(150):  # so that the first ones are not on the first page
        body = Message("default", "doomed", (number,), {}, {}).encode()
        bury(broker, body, f"buried-{number}", died_at=current_millis() + (number + 1) * 1000)
    [last] = newest(store, 1)

    found = find(store, {sent[0].message_id, last.broker_id, "nobody"})

    assert {name: letter.id for name, letter in found.items()} == {
        sent[0].message_id: sent[0].message_id,
        last.broker_id: last.id,
    }


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\xff\x00not json", ""),
        (b"[1, 2]", ""),
        (b'{"queue_name": "default"}', "'args'"),
        (
            b'{"queue_name":"default","actor_name":5,"args":[],"kwargs":{},"options":{},"message_id":"x"}',
            "its actor_name is of type int",
        ),
        (
            b'{"queue_name":"default","actor_name":"a","args":[],"kwargs":{},"options":7,"message_id":"x"}',
            "its options is of type int",
        ),
        (b"[" * 100_000, ""),
    ],
)
def test_unreadable_letter_is_listed_by_broker_id_with_the_reason(  # R6, B3
    broker: Any, store: DeadLetterStore, body: bytes, why: str
) -> None:
    bury(broker, body)

    [letter] = newest(store, 10)

    assert list(find(store, {"5-5"})) == ["5-5"]
    assert (letter.id, letter.message, letter.body) == ("5-5", None, body)
    assert letter.unreadable and why in letter.unreadable
    assert letter.error == letter.unreadable


def test_unreadable_letter_shows_no_secret_of_its_arguments(  # R6
    broker: Any, store: DeadLetterStore
) -> None:
    arguments = ["redis://:hunter2@host/0", {"password": "hunter2"}]
    bury(broker, json.dumps({**Message("default", "a", (), {}, {}).asdict(), "kwargs": arguments}).encode())

    [letter] = newest(store, 10)
    with pytest.raises(Refused) as refused:
        requeue(store, ["5-5"])

    assert letter.unreadable == "its kwargs is of type list"
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("traceback", ["", "\n"])
def test_letter_with_an_empty_traceback_is_listed_with_the_others(  # R6
    broker: Any, store: DeadLetterStore, traceback: str
) -> None:
    bury(broker, Message("default", "a", (), {}, {"traceback": traceback}, message_id="empty").encode())

    assert [(letter.id, letter.error) for letter in newest(store, 10)] == [("empty", None)]


def test_unsupported_broker_is_refused_with_an_explanation() -> None:
    with pytest.raises(Refused, match="of a StubBroker cannot be listed"):
        dead_letters_of(StubBroker())


def test_newest_of_several_letters_with_one_id_is_found(broker: Any, store: DeadLetterStore) -> None:  # R6
    body = Message("default", "someone", (), {}, {}, message_id="twice").encode()
    for place, (broker_id, queue) in enumerate([("1", "a"), ("2", "b"), ("3", "b"), ("4", "a")]):
        bury(broker, body, broker_id, queue, died_at=current_millis() - 10_000 + place * 1000)

    assert find(store, {"twice"})["twice"].broker_id == "4"
