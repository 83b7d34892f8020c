"""Unreadable messages: each becomes a dead letter, and affects no other."""

from __future__ import annotations

import json
import logging
from typing import Any

import dramatiq
import pytest
from dramatiq import Message

from tests.integration.middleware.applications import eventually, queued, working
from tests.internals.brokers import DeadLetterStore, newest
from tests.rabbitmq_look import on_rabbitmq

_OF_REDIS = pytest.mark.redis_broker_only(reason="the option is of the Redis broker")


def of_queue(queue: str, **options: object) -> bytes:
    return Message(queue_name=queue, actor_name="good", args=(), kwargs={}, options=dict(options)).encode()


def with_part(name: str, part: object) -> bytes:
    """Return a message that is valid except for this part."""
    good = json.loads(of_queue("default", redis_message_id="poison"))
    return json.dumps({**good, name: part}).encode()


def nested(levels: int) -> list[Any]:
    """Return an empty list within other lists."""
    return [nested(levels - 1)] if levels > 1 else []


def put(broker: Any, body: bytes) -> None:
    if on_rabbitmq(broker):
        broker.channel.basic_publish("", broker.physical("default"), body)
    else:
        broker.do_enqueue("default", "poison", body)


@pytest.mark.parametrize(
    "body",
    [
        b"\x80not json",
        b'{"queue_name": "default"}',
        b"[]",
        pytest.param(of_queue("default"), marks=_OF_REDIS),
        with_part("options", []),
        with_part("actor_name", ["good"]),
        with_part("message_id", {}),
        with_part("message_id", ["a"]),
        with_part("message_id", "a\0"),
        with_part("message_id", "\ud800"),
        pytest.param(with_part("options", {"redis_message_id": "\ud800"}), marks=_OF_REDIS),
        with_part("options", {"redis_message_id": "poison", "throws": ["ValueError"]}),
        with_part("options", {"redis_message_id": "poison", "time_limit": "60000"}),
        with_part("args", [nested(501)]),
        with_part("message_timestamp", "now"),
        with_part("kwargs", []),
    ],
)
def test_unreadable_message_affects_no_other(  # B3
    broker: Any, store: DeadLetterStore, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert_affects_no_other(broker, store, body, caplog)


def test_message_of_another_queue_affects_no_other(  # B3
    broker: Any, store: DeadLetterStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert_affects_no_other(broker, store, of_queue("elsewhere", redis_message_id="poison"), caplog)


def assert_affects_no_other(broker: Any, store: DeadLetterStore, body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    ran = []

    @dramatiq.actor(broker=broker)
    def good() -> None:
        ran.append(1)

    good.send()
    put(broker, body)
    good.send()
    good.send()
    with working(broker):
        eventually(lambda: len(ran) == 3)
        eventually(lambda: [letter.body for letter in newest(store, 10)] == [body])

    assert [r.levelno for r in caplog.records if "Unreadable message" in r.getMessage()] == [logging.ERROR]
    assert not [record for record in caplog.records if record.levelno == logging.CRITICAL]


def test_deeply_nested_arguments_are_processed(broker: Any) -> None:  # B3
    ran: list[Any] = []
    dramatiq.actor(broker=broker, actor_name="work")(ran.append).send(nested(500))

    with working(broker):
        eventually(lambda: not queued(broker))

    assert ran == [nested(500)]
