"""Bulk enqueue in one script has the results of single sends (D1, D2, D6)."""

from __future__ import annotations

from typing import Any

import pytest
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings, enqueue_many
from tests.faults import elsewhere, lose_connection, once, redis_fault
from tests.integration.middleware.applications import queued
from tests.integration.middleware.enqueue_many.bulked import actor_of, keys
from tests.internals.middleware import BATCH_SIZE

pytestmark = pytest.mark.redis_broker_only(reason="it is about messages and keys in one transaction of Redis")


def held(broker: RedisBroker, settings: Settings) -> list[dict[bytes, bytes]]:
    """Return the values of the deduplication keys."""
    client: Any = broker.client
    return [client.hgetall(key) for key in keys(broker, settings)]


@pytest.mark.parametrize("options", [{}, {"claim": "of a tick"}], ids=["plain", "with the claim of a tick"])
def test_bulk_key_has_the_state_that_send_gives_it(
    broker: RedisBroker, settings: Settings, options: dict[str, Any]
) -> None:
    work = actor_of(broker, deduplicate="until_executed")
    sent = work.send_with_options(args=(1,), **options)
    (by_send,) = held(broker, settings)
    broker.client.delete(*keys(broker, settings))

    (bulk,) = enqueue_many(work, [2], **options)

    (by_bulk,) = held(broker, settings)
    ids = {b"id": sent.message_id.encode(), b"queued": sent.options["redis_message_id"].encode()}
    assert by_send == by_send | ids
    assert by_bulk == by_send | {
        b"id": bulk.message_id.encode(),
        b"queued": bulk.options["redis_message_id"].encode(),
    }


def test_duplicates_are_dropped_wherever_they_are_in_the_bulk(broker: RedisBroker) -> None:
    work = actor_of(broker)
    taken = [0, 100, BATCH_SIZE - 1, BATCH_SIZE, 2 * BATCH_SIZE]
    holders = {number: work.send(number).message_id for number in taken}

    messages = enqueue_many(work, range(2 * BATCH_SIZE + 1))

    dropped = {
        message.args[0]: message.options["duplicate_of"] for message in messages if "duplicate_of" in message.options
    }
    waiting: Any = broker.client.lrange(f"{broker.namespace}:default", 0, -1)
    enqueued = [message for message in messages if "duplicate_of" not in message.options]
    assert dropped == holders
    assert [each.decode() for each in waiting][len(taken) :] == [message.message_id for message in enqueued]
    assert len(queued(broker)) == len(waiting) == 2 * BATCH_SIZE + 1


def test_repeated_script_changes_nothing(broker: RedisBroker, settings: Settings) -> None:  # D6
    with redis_fault("enqueue", "after", once(lose_connection)):
        messages = enqueue_many(actor_of(broker), [1, 2, 2, 3])

    assert ["duplicate_of" in message.options for message in messages] == [False, False, True, False]
    assert [message.args for message in queued(broker)] == [(1,), (2,), (3,)]
    assert broker.client.llen(f"{broker.namespace}:default") == len(keys(broker, settings)) == 3


def test_script_repeated_after_its_keys_expired_enqueues_none_twice(
    broker: RedisBroker, settings: Settings
) -> None:  # D6: they wait for longer than the ttl
    def forget_and_lose() -> None:
        elsewhere(lambda: broker.client.delete(*keys(broker, settings)))()
        lose_connection()

    with redis_fault("enqueue", "after", once(forget_and_lose)):
        enqueue_many(actor_of(broker), [1, 2])

    assert broker.client.llen(f"{broker.namespace}:default") == 2
    assert len(queued(broker)) == 2


def test_duplicate_is_returned_as_send_returns_it(broker: RedisBroker) -> None:  # D2
    work = actor_of(broker)
    first = work.send(1)
    by_send = work.send_with_options(args=(1,), trigger="parent")

    (by_bulk,) = enqueue_many(work, [1], trigger="parent")

    assert by_bulk.options == by_send.options == {"trigger": "parent", "duplicate_of": first.message_id}
