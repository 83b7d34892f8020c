"""Faults of taking keys and enqueueing messages in one step (promises D3, D6, D10, F5)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from housekeeping.middleware.call_keys import digest
from housekeeping.middleware.enqueueing.path import EnqueuePath
from tests.twins import Twin
from tests.twins.planting import in_script, instead_at

_ENQUEUEING: Final = "tests/integration/middleware/deduplication/test_enqueueing.py::"
_BULK: Final = "tests/integration/middleware/enqueue_many/test_bulk.py::"


def _publishes_without_a_transaction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockingChannel, "tx_select", lambda self: None)
    patch.setattr(BlockingChannel, "tx_commit", lambda self: None)


def _ping_for_each(patch: pytest.MonkeyPatch) -> None:
    write = EnqueuePath._write

    def ping_and_write(self: Any, messages: Any, steps: Any) -> Any:
        for _ in messages:
            self._broker.client.ping()
        return write(self, messages, steps)

    patch.setattr(EnqueuePath, "_write", ping_and_write)


_TAKE_TURNS: Final = instead_at("housekeeping.middleware.enqueueing.path.share_redis", lambda queues, keys: False)

TWINS: Final[list[Twin]] = [
    Twin(
        "D3",
        "compares_arguments_as_written",
        f"{_BULK}test_duplicate_call_is_dropped_and_marked",
        instead_at("housekeeping.middleware.call_keys.digest", lambda actor, *call: repr(call)),
    ),
    Twin(
        "D3",
        "ignores_idempotency_keys",
        "tests/integration/middleware/deduplication/test_idempotency_keys.py::"
        "test_different_idempotency_keys_both_have_an_effect",
        instead_at(
            "housekeeping.middleware.deduplication.steps.message_digest",
            lambda actor, message, key: digest(actor, message.args, message.kwargs, key),
        ),
    ),
    Twin(
        "D6",
        "claims_the_key_before_enqueueing",
        f"{_ENQUEUEING}test_sender_killed_anywhere_leaves_message_and_key_or_neither",
        _TAKE_TURNS,
    ),
    Twin(
        "D6",
        "claims_the_keys_before_the_bulk",
        "tests/integration/middleware/enqueue_many/test_bulk_faults.py::test_bulk_sender_killed_anywhere_leaves_all_messages_and_keys_or_none",
        _TAKE_TURNS,
    ),
    Twin(
        "D6",
        "enqueues_again_after_a_lost_answer",
        f"{_ENQUEUEING}test_message_without_key_and_lost_answer_is_enqueued_once",
        in_script("WITH_ENQUEUEING", 'if redis.call("hexists", messages, copy) == 1 then return "" end', ""),
    ),
    Twin(
        "D6",
        "enqueues_a_second_copy",
        f"{_ENQUEUEING}test_message_reenqueued_after_lost_answer_is_queued_once",
        in_script("WITH_ENQUEUEING", 'if ARGV[1] == "1" and waits() then', "if false then"),
    ),
    Twin(
        "D6",
        "loses_requeued_messages",
        f"{_ENQUEUEING}test_dead_letter_may_be_enqueued_again",
        in_script(
            "WITH_ENQUEUEING", 'if queued and redis.call("hexists", messages, queued) == 1 then', "if queued then"
        ),
    ),
    Twin(
        "D6",
        "reserves_for_the_whole_ttl",
        f"{_ENQUEUEING}test_key_on_other_redis_expires_soon_without_its_message",
        instead_at("housekeeping.middleware.deduplication.keys.RESERVED_FOR", timedelta(hours=1)),
    ),
    Twin(
        "D10",
        "makes_a_round_trip_per_message",
        f"{_BULK}test_thousand_messages_cost_as_many_round_trips_as_two",
        _ping_for_each,
    ),
    Twin(
        "D10",
        "sends_many_to_rabbitmq_one_by_one",
        "tests/integration/brokers/rabbitmq/test_bulk_sending.py"
        "::test_rabbitmq_takes_a_thousand_messages_in_as_many_round_trips_as_one",
        instead_at("housekeeping.middleware.enqueueing.path._put_many", lambda broker: None),
    ),
    Twin(
        "D6",
        "sends_many_to_rabbitmq_without_a_transaction",
        "tests/integration/brokers/rabbitmq/test_bulk_sending.py::test_bulk_whose_connection_breaks_half_way_leaves_no_message",
        _publishes_without_a_transaction,
    ),
    Twin(
        "F5",
        "leaves_a_key_without_a_message",
        f"{_ENQUEUEING}test_scheduler_killed_after_sending_leaves_only_the_message",
        _TAKE_TURNS,
        in_processes=True,
        slow=True,
    ),
]
