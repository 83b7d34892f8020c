from __future__ import annotations

from typing import Any

import dramatiq
import pytest

from housekeeping.dead_letters import dead_letters_of, requeue
from housekeeping.dead_letters.letters import DeadLetterStore
from housekeeping.foundation.errors import DeadLetterRefused
from tests.integration.middleware.applications import eventually, queued, working
from tests.rabbitmq_look import bodies


class Crash(BaseException):
    """The end of the operator's process."""


@pytest.fixture
def store(broker: Any) -> DeadLetterStore:
    """Three dead letters of one actor."""

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

    newest = store.newest(2)

    assert len(newest) == 2
    assert all((letter.error or "").startswith("ValueError: no") for letter in newest)
    assert all(letter.died_at is not None for letter in newest)
    assert store.counts() == {"default": 3}
    assert bodies(broker, "default.XQ") == before


def test_a_requeued_letter_is_in_its_queue_and_no_longer_dead(broker: Any, store: DeadLetterStore) -> None:  # R6
    letter = store.newest(3)[1]

    [result] = requeue(store, [letter.id])

    [message] = queued(broker)
    assert (result.outcome, message.message_id) == ("requeued", letter.id)
    assert "traceback" not in message.options
    assert letter.id not in [dead.message_id for dead in queued(broker, "default.XQ")]
    assert store.counts() == {"default": 2}
    assert store.requeue(letter).outcome == "gone"


def test_a_requeue_that_dies_half_way_leaves_the_letter_where_it_was(  # R6
    broker: Any, store: DeadLetterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise Crash

    [letter] = store.newest(1)
    monkeypatch.setattr("pika.adapters.blocking_connection.BlockingChannel.tx_commit", crash)
    with pytest.raises(Crash):
        store.requeue(letter)

    assert queued(broker) == []
    assert store.counts() == {"default": 3}


def test_a_letter_that_cannot_be_read_is_known_by_its_brokers_id(broker: Any, store: DeadLetterStore) -> None:  # B3
    broker.bury("default", b"\x80")

    [unreadable] = [letter for letter in store.newest(10) if letter.message is None]

    assert list(store.find({unreadable.broker_id})) == [unreadable.broker_id]
    with pytest.raises(DeadLetterRefused, match="cannot be read"):
        requeue(store, [unreadable.broker_id])
