"""Faults of deduplication: keys, sending and the further run (promises D1 to D10, F5, F6)."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import pytest

from tests.internals.middleware import EnqueuePath, config_of, deduplication, digest, enqueue
from tests.internals.middleware import deduplication as steps
from tests.internals.middleware import keys as call_keys
from tests.twins import Twin
from tests.twins.planting import Breaks, in_script, instead

_SENDING: Final = "tests/integration/middleware/deduplication/test_sending.py::"
_ENDINGS: Final = "tests/integration/middleware/deduplication/test_endings.py::"
#: Check of a script before it grants a key or starts a message.
ANOTHER_HOLDS_IT: Final = "if holder and holder ~= message_id then"
_ENQUEUEING: Final = "tests/integration/middleware/deduplication/test_enqueueing.py::"
_BULK: Final = "tests/integration/middleware/enqueue_many/test_bulk.py::"
_TAKE_TURNS: Final = instead(enqueue, "share_redis", lambda queues, keys: False)
_TURNS: Final = "tests/integration/middleware/deduplication/test_turns.py::"
_ONE_MORE: Final = "tests/integration/middleware/deduplication/test_reschedule_once.py::"
_ASKS: Final = 'if given.ask_for_rerun and running then redis.call("hset", KEYS[1], "again", "1") end'


def _config(**other: Any) -> Breaks:
    def broken(actor: Any) -> Any:
        config = config_of(actor)
        return config and dataclasses.replace(config, **other)

    return lambda patch: patch.setattr(deduplication, "config_of", broken)


def _ping_for_each(patch: pytest.MonkeyPatch) -> None:
    write = EnqueuePath._write

    def ping_and_write(self: Any, messages: Any, *given: Any) -> Any:
        for _ in messages:
            self._broker.client.ping()
        return write(self, messages, *given)

    patch.setattr(EnqueuePath, "_write", ping_and_write)


TWINS: Final[list[Twin]] = [
    Twin(
        "D1",
        "ignores_the_holder_of_a_key",
        f"{_SENDING}test_of_many_concurrent_senders_one_enqueues",
        in_script("CLAIM", ANOTHER_HOLDS_IT, "if false then"),
    ),
    Twin(
        "D2",
        "drops_messages_with_dependents",
        f"{_SENDING}test_pipe_target_is_never_dropped",
        instead(steps, "has_dependents", lambda message: False),
    ),
    Twin(
        "D4",
        "never_releases_a_key",
        f"{_SENDING}test_until_executed_holds_its_key_until_the_run_ends",
        in_script("RELEASE", 'redis.call("del", KEYS[1])', ""),
    ),
    Twin(
        "D5",
        "releases_the_key_of_another_delivery",
        f"{_ENDINGS}test_second_delivery_keeps_the_key_of_the_running_first",
        in_script("RELEASE", "if held_by ~= run and (given.started or held_by) then return 0 end", ""),
    ),
    Twin(
        "D9",
        "counts_delayed_messages_as_live",
        f"{_SENDING}test_delayed_message_holds_no_key_before_it_is_due",
        _config(including_scheduled=True),
    ),
    Twin(
        "D3",
        "compares_arguments_as_written",
        f"{_BULK}test_duplicate_call_is_dropped_and_marked",
        instead(call_keys, "digest", lambda actor, *call: repr(call)),
    ),
    Twin(
        "D3",
        "ignores_idempotency_keys",
        "tests/integration/middleware/deduplication/test_idempotency_keys.py::"
        "test_different_idempotency_keys_both_have_an_effect",
        instead(
            steps,
            "message_digest",
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
        "enqueues_again_after_a_lost_answer",
        f"{_ENQUEUEING}test_message_without_key_and_lost_answer_is_enqueued_once",
        in_script("WITH_ENQUEUEING", 'if redis.call("hexists", messages, copy) == 1 then return "" end', ""),
    ),
    Twin(
        "D10",
        "makes_a_round_trip_per_message",
        f"{_BULK}test_thousand_messages_cost_as_many_round_trips_as_two",
        _ping_for_each,
    ),
    Twin(
        "F5",
        "leaves_a_key_without_a_message",
        f"{_ENQUEUEING}test_scheduler_killed_after_sending_leaves_only_the_message",
        _TAKE_TURNS,
        in_processes=True,
        slow=True,
    ),
    Twin(
        "D7",
        "treats_a_redelivery_as_a_duplicate",
        f"{_TURNS}test_redelivery_of_the_holder_runs",
        in_script("START", ANOTHER_HOLDS_IT, "if holder then"),
    ),
    Twin(
        "D7",
        "runs_beside_the_holder_of_its_key",
        f"{_TURNS}test_message_that_lost_its_key_waits_for_the_running_one",
        in_script("START", ANOTHER_HOLDS_IT, "if false then"),
    ),
    Twin(
        "D8",
        "treats_a_lost_key_as_released",
        f"{_ONE_MORE}test_rerun_is_enqueued_although_redis_came_back_empty",
        in_script("RELEASE", "run and 2 or 0", "0"),
    ),
    Twin(
        "F6",
        "ignores_a_duplicate_during_the_last_batch",
        f"{_ONE_MORE}test_run_starts_after_every_duplicate_whenever_it_arrives",
        in_script("CLAIM", _ASKS, ""),
    ),
]
