"""Faults of deduplication (semantics.md, D1 to D10; scenarios F5 and F6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest
from dramatiq import Message
from pika.adapters.blocking_connection import BlockingChannel

from housekeeping.foundation.errors import RedisUnavailable
from housekeeping.foundation.redis_client import insist
from housekeeping.middleware import deduplication, deduplication_keys, deduplication_scripts
from housekeeping.middleware.arguments import UnusableArguments
from housekeeping.middleware.deduplication_options import terms_of
from housekeeping.middleware.deduplication_steps import name_key
from tests.twins import Twin

Breaks = Callable[[pytest.MonkeyPatch], None]

_FOLDER: Final = "tests/integration/middleware/"
_SENDING: Final = f"{_FOLDER}test_deduplication_sending.py::"
_ENDINGS: Final = f"{_FOLDER}test_deduplication_endings.py::"
_KEYS: Final = f"{_FOLDER}test_deduplication_keys.py::"
_TURNS: Final = f"{_FOLDER}test_deduplication_turns.py::"
_LIMITS: Final = f"{_FOLDER}test_deduplication_limits.py::"
_ENQUEUEING: Final = f"{_FOLDER}test_deduplication_enqueueing.py::"
_ONE_MORE: Final = f"{_FOLDER}test_deduplication_one_more_run.py::"
_TICKS: Final = f"{_FOLDER}test_deduplication_ticks.py::"
_BULK: Final = f"{_FOLDER}test_bulk.py::"


def _in_script(name: str, right: str, wrong: str) -> Breaks:
    """Another text in a script."""

    def breaks(patch: pytest.MonkeyPatch) -> None:
        script: str = getattr(deduplication_scripts, name)
        assert script.count(right) == 1, f"{name} has changed"
        patch.setattr(deduplication_scripts, name, script.replace(right, wrong))

    return breaks


def _instead(target: str, broken: Any) -> Breaks:
    return lambda patch: patch.setattr(target, broken)


def _free_only_what_succeeded(patch: pytest.MonkeyPatch) -> None:
    after = deduplication.Deduplication.after_process_message

    def after_process_message(
        self: Any, broker: Any, message: Any, *, result: Any = None, exception: Any = None
    ) -> None:
        if exception is None:
            after(self, broker, message, result=result)

    patch.setattr(deduplication.Deduplication, "after_process_message", after_process_message)


def _give_up_after_three_tries(patch: pytest.MonkeyPatch) -> None:
    def give_up(step: Any, **options: Any) -> Any:
        try:
            return insist(step, **options)
        except RedisUnavailable as error:
            raise UnusableArguments(str(error)) from error

    patch.setattr(deduplication, "insist", give_up)


def _terms(**other: Any) -> Breaks:
    def broken(actor: Any) -> Any:
        terms = terms_of(actor)
        return terms and dataclasses.replace(terms, **other)

    return lambda patch: patch.setattr(deduplication, "terms_of", broken)


def _ask_once_more(patch: pytest.MonkeyPatch) -> None:
    start = deduplication_keys.DeduplicationKeys.start

    def look_and_start(self: Any, key: str, *args: Any) -> Any:
        self.client.exists(self.prefix + key)
        return start(self, key, *args)

    patch.setattr(deduplication_keys.DeduplicationKeys, "start", look_and_start)


def _marks_what_it_was_given(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Message, "copy", lambda self, **given: self if not given else _copy(self, **given))


_copy: Final[Any] = Message.copy


def _publishes_without_a_transaction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockingChannel, "tx_select", lambda self: None)
    patch.setattr(BlockingChannel, "tx_commit", lambda self: None)


def _left_one_by_one(bulk: Any) -> list[Any]:
    left = [(place, message) for place, message in enumerate(bulk._messages) if place not in bulk._skips]
    for _ in left:
        bulk._broker.client.ping()
    return left


_ANOTHER_HOLDS_IT: Final = "if holder and holder ~= ARGV[1] then"
_ASKS: Final = 'if ARGV[4] == "1" and running then redis.call("hset", KEYS[1], "again", "1") end'
_OF_ANOTHER_COPY: Final = (
    'if ARGV[6] ~= "" and (redis.call("hget", KEYS[1], "tick") or ARGV[6]) ~= ARGV[6] then return 0 end'
)
_TAKE_TURNS: Final = _instead("housekeeping.middleware.deduplication.share_redis", lambda broker, keys: False)

TWINS: Final[list[Twin]] = [
    Twin(
        "D4",
        "names_keys_by_the_release_that_runs",
        f"{_FOLDER}test_releases.py::test_a_key_that_an_older_release_has_taken_is_freed_by_the_one_that_ends_its_message",
        _instead("housekeeping.middleware.deduplication.key_of", name_key),
    ),
    Twin(
        "D1",
        "sees_no_other_holder",
        f"{_SENDING}test_of_many_senders_at_once_one_enqueues",
        _in_script("CLAIM", _ANOTHER_HOLDS_IT, "if false then"),
    ),
    Twin(
        "D1",
        "lets_go_while_a_retry_waits",
        f"{_SENDING}test_a_retry_of_until_executed_holds_its_key_while_it_waits",
        _in_script("HOLD_ON", 'redis.call("del", KEYS[1])', 'redis.call("del", KEYS[1]) if true then return "" end'),
    ),
    Twin(
        "D1",
        "holds_on_though_it_has_started",
        f"{_SENDING}test_until_executing_frees_its_key_when_it_starts",
        _in_script("START", 'redis.call("del", KEYS[1])', ""),
    ),
    Twin(
        "D1",
        "frees_the_key_of_a_ticks_other_copy",
        f"{_TICKS}test_the_copy_of_a_tick_that_is_refused_leaves_the_key_to_the_one_that_waits",
        _in_script("RELEASE", _OF_ANOTHER_COPY, ""),
    ),
    Twin(
        "D5",
        "frees_the_key_of_a_ticks_retry",
        f"{_TICKS}test_the_copy_of_a_tick_that_is_refused_leaves_the_key_to_a_retry_that_waits",
        _in_script("HOLD_ON", 'redis.call("hset", KEYS[1], "tick", ARGV[6])', ""),
    ),
    Twin(
        "D4",
        "leaves_the_key_of_a_refused_copy",
        f"{_TICKS}test_no_copy_of_a_tick_leaves_its_key_behind",
        _in_script("RELEASE", _OF_ANOTHER_COPY, 'if ARGV[6] ~= "" then return 0 end'),
    ),
    Twin(
        "D2",
        "raises_for_a_duplicate",
        f"{_SENDING}test_a_duplicate_comes_back_marked_and_is_not_enqueued",
        _instead("housekeeping.middleware.enqueueing.dropped", None),
    ),
    Twin(
        "D2",
        "drops_what_others_wait_for",
        f"{_SENDING}test_the_target_of_a_pipe_is_never_dropped",
        _instead("housekeeping.middleware.deduplication_steps.waited_for", lambda message: False),
    ),
    Twin(
        "D2",
        "counts_no_duplicate",
        f"{_FOLDER}test_deduplication_metric.py::test_each_dropped_duplicate_is_counted_once_wherever_it_was_dropped",
        _instead("housekeeping.foundation.metrics.count_deduplicated", lambda worker: None),
    ),
    Twin(
        "D3",
        "takes_arguments_as_they_are_written",
        f"{_BULK}test_a_call_that_waits_already_is_dropped_and_marked",
        _instead("housekeeping.middleware.deduplication_steps.digest", lambda actor, *call: repr(call)),
    ),
    Twin(
        "D4",
        "never_frees_a_key",
        f"{_SENDING}test_until_executed_holds_its_key_while_it_runs_and_no_longer",
        _in_script("RELEASE", 'redis.call("del", KEYS[1])', ""),
    ),
    Twin(
        "D4",
        "frees_only_what_succeeded",
        f"{_ENDINGS}test_a_key_is_free_when_a_failed_message_is_not_tried_again",
        _free_only_what_succeeded,
    ),
    Twin(
        "D4",
        "holds_on_for_ever_when_it_is_killed",
        f"{_ENDINGS}test_the_key_of_a_killed_run_expires",
        _in_script("START", 'redis.call("pexpire", KEYS[1], ARGV[2])', ""),
    ),
    Twin(
        "D5",
        "frees_what_another_delivery_uses",
        f"{_ENDINGS}test_a_second_delivery_frees_nothing_while_the_first_one_runs",
        _in_script("RELEASE", 'if (redis.call("hget", KEYS[1], "run") or "") ~= ARGV[4] then return 0 end', ""),
    ),
    Twin(
        "D5",
        "renews_the_key_of_another",
        f"{_KEYS}test_only_the_run_that_holds_a_key_renews_and_frees_it",
        _in_script("RENEW", 'if redis.call("hget", KEYS[1], "run") ~= ARGV[1] then return 0 end', ""),
    ),
    Twin(
        "D6",
        "takes_the_key_before_the_enqueueing",
        f"{_ENQUEUEING}test_wherever_a_sender_dies_message_and_key_are_both_there_or_neither",
        _TAKE_TURNS,
    ),
    Twin(
        "D6",
        "takes_the_keys_before_the_bulk",
        f"{_FOLDER}test_bulk_faults.py::test_wherever_a_sender_of_many_dies_all_are_there_with_their_keys_or_none",
        _TAKE_TURNS,
    ),
    Twin(
        "D6",
        "enqueues_what_is_there_already",
        f"{_ENQUEUEING}test_a_message_without_a_key_is_enqueued_once_though_its_answer_is_lost",
        _in_script("WITH_ENQUEUEING", 'if redis.call("hexists", messages, copy) == 1 then return "" end', ""),
    ),
    Twin(
        "D6",
        "enqueues_a_second_copy",
        f"{_ENQUEUEING}test_a_message_that_is_enqueued_again_because_its_answer_was_lost_is_there_once",
        _in_script("WITH_ENQUEUEING", 'if ARGV[1] == "1" and waits() then', "if false then"),
    ),
    Twin(
        "D6",
        "loses_what_is_requeued",
        f"{_ENQUEUEING}test_a_message_that_left_its_queue_for_the_dead_letters_may_be_enqueued_again",
        _in_script(
            "WITH_ENQUEUEING", 'if queued and redis.call("hexists", messages, queued) == 1 then', "if queued then"
        ),
    ),
    Twin(
        "D6",
        "reserves_for_the_whole_ttl",
        f"{_ENQUEUEING}test_a_key_on_another_redis_is_reserved_for_seconds_only_when_its_message_never_came",
        _instead("housekeeping.middleware.deduplication_keys.RESERVED_FOR", timedelta(hours=1)),
    ),
    Twin(
        "D7",
        "takes_itself_for_a_duplicate",
        f"{_TURNS}test_a_redelivery_of_the_holder_runs",
        _in_script("START", _ANOTHER_HOLDS_IT, "if holder then"),
    ),
    Twin(
        "D7",
        "runs_beside_the_one_that_runs",
        f"{_TURNS}test_a_message_that_lost_its_key_waits_for_the_one_that_runs",
        _in_script("START", _ANOTHER_HOLDS_IT, "if false then"),
    ),
    Twin(
        "D8",
        "asks_for_no_further_run",
        f"{_TURNS}test_duplicates_that_arrive_while_the_holder_runs_make_one_more_run",
        _in_script("CLAIM", _ASKS, ""),
    ),
    Twin(
        "D8",
        "runs_again_for_a_duplicate_of_one_that_waits",
        f"{_TURNS}test_a_duplicate_of_one_that_waits_makes_no_further_run",
        _in_script("CLAIM", "and running then", "then"),
    ),
    Twin(
        "D8",
        "forgets_the_further_run_with_the_answer",
        f"{_KEYS}test_a_run_that_is_wanted_is_owed_until_its_message_takes_the_key_over",
        _in_script("RELEASE", 'redis.call("pexpire", KEYS[1], ARGV[2])', 'redis.call("del", KEYS[1])'),
    ),
    Twin(
        "D8",
        "gives_up_after_three_tries",
        f"{_ONE_MORE}test_the_one_more_run_is_made_however_long_redis_is_away",
        _give_up_after_three_tries,
    ),
    Twin(
        "R5",
        "gives_up_when_it_is_told_to_stop",
        "tests/acceptance/test_shutdown_without_redis.py"
        "::test_a_worker_that_cannot_give_back_a_key_stops_in_time_and_its_message_is_delivered_again",
        _give_up_after_three_tries,
        in_processes=True,
    ),
    Twin(
        "D8",
        "takes_a_lost_key_for_a_free_one",
        f"{_ONE_MORE}test_the_one_more_run_is_made_though_redis_came_back_empty",
        _in_script("RELEASE", 'ARGV[4] ~= "" and 2 or 0', "0"),
    ),
    Twin(
        "D8",
        "takes_what_was_put_back_for_a_retry",
        f"{_ONE_MORE}test_a_run_that_is_put_back_owes_the_one_more_run_after_it",
        _in_script("HOLD_ON", 'ARGV[5] == "1" and redis.call', "false and redis.call"),
    ),
    Twin(
        "D8",
        "takes_the_key_over_before_the_message_is_there",
        f"{_ONE_MORE}test_the_one_more_run_is_owed_until_its_message_is_on_the_other_server",
        _in_script("CLAIM", 'if ARGV[3] == "reserved" then return "" end', ""),
    ),
    Twin(
        "D8",
        "never_takes_the_key_over",
        f"{_ONE_MORE}test_the_one_more_run_is_made_where_keys_and_queue_are_on_different_servers",
        _in_script("CONFIRM", "run and run == ARGV[4]", "false"),
    ),
    Twin(
        "D8",
        "believes_the_marks_of_a_failed_try",
        f"{_ONE_MORE}test_a_message_that_could_not_be_sent_is_sent_as_new_the_next_time",
        _marks_what_it_was_given,
    ),
    Twin(
        "D4",
        "keeps_what_it_reserved_for_a_refused_message",
        f"{_ONE_MORE}test_a_key_on_another_server_is_free_at_once_when_its_message_is_refused",
        _instead("housekeeping.middleware.deduplication.Deduplication._not_enqueued", lambda self: None),
    ),
    Twin(
        "D9",
        "takes_delayed_messages_for_live_ones",
        f"{_SENDING}test_a_delayed_message_is_not_live_before_it_is_due",
        _terms(including_scheduled=True),
    ),
    Twin(
        "D9",
        "takes_no_delayed_message_for_a_live_one",
        f"{_SENDING}test_a_delayed_message_with_including_scheduled_is_live_from_the_start",
        _terms(including_scheduled=False),
    ),
    Twin(
        "D10",
        "leaves_keys_behind",
        f"{_LIMITS}test_there_are_no_more_keys_than_live_messages_and_each_expires",
        _in_script("CLAIM", 'redis.call("pexpire", KEYS[1], ARGV[2])', ""),
    ),
    Twin(
        "D10",
        "asks_once_more",
        f"{_LIMITS}test_a_message_costs_no_more_round_trips_than_its_steps",
        _ask_once_more,
    ),
    Twin(
        "D10",
        "asks_for_each_of_many",
        f"{_BULK}test_a_thousand_messages_cost_as_many_round_trips_as_one",
        _instead("housekeeping.middleware.bulk._Bulk._left", _left_one_by_one),
    ),
    Twin(
        "D10",
        "sends_many_to_rabbitmq_one_by_one",
        "tests/integration/rabbitmq/test_bulk_sending.py"
        "::test_rabbitmq_takes_a_thousand_messages_in_as_many_round_trips_as_one",
        _instead("housekeeping.middleware.bulk._kind_of_bulk", lambda broker: None),
    ),
    Twin(
        "D6",
        "sends_many_to_rabbitmq_without_a_transaction",
        "tests/integration/rabbitmq/test_bulk_sending.py::test_a_bulk_whose_connection_breaks_half_way_leaves_no_message",
        _publishes_without_a_transaction,
    ),
    Twin(
        "F5",
        "leaves_a_key_without_a_message",
        f"{_ENQUEUEING}test_a_scheduler_killed_once_its_message_was_sent_leaves_it_and_nothing_else",
        _TAKE_TURNS,
        in_processes=True,
        slow=True,
    ),
    Twin(
        "F6",
        "lets_a_duplicate_of_the_last_batch_go",
        f"{_ONE_MORE}test_whenever_a_duplicate_arrives_some_run_starts_its_reading_after_it",
        _in_script("CLAIM", _ASKS, ""),
    ),
]
