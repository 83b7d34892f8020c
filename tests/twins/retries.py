"""Faults of retries, shutdown and dead letters (semantics.md, R1 to R6; scenario F10)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest

from housekeeping.dead_letters import letters, on_redis
from housekeeping.foundation import interruption, printable
from housekeeping.middleware import (
    dead_letters,
    deduplication,
    deduplication_options,
    group_callbacks,
    idempotency,
    patience,
    retries,
    statements,
)
from housekeeping.middleware.idempotency import Idempotency
from housekeeping.middleware.run_log import RunLog
from housekeeping.middleware.schedule import Schedule
from housekeeping.middleware.shutdown import ShutdownNotifications
from tests.twins import Twin

Breaks = Callable[[pytest.MonkeyPatch], None]

_FOLDER: Final = "tests/integration/middleware/"
_RETRIES: Final = f"{_FOLDER}test_retries.py::"
_FOLLOW_UPS: Final = f"{_FOLDER}test_follow_ups.py::"
_SHUTDOWN: Final = f"{_FOLDER}test_shutdown.py::"
_STATEMENTS: Final = f"{_FOLDER}test_statements.py::"
_STORMS: Final = f"{_FOLDER}test_retry_storms.py::"
_LOOKING: Final = "tests/integration/dead_letters/test_looking.py::"
_REQUEUEING: Final = "tests/integration/dead_letters/test_requeueing.py::"
_COMMAND: Final = "tests/acceptance/test_dead_letters_command.py::"


class _Never(Exception):
    """An error that nobody raises."""


def _instead(owner: Any, name: str, broken: Any) -> Breaks:
    return lambda patch: patch.setattr(owner, name, broken)


def _in_text(owner: Any, name: str, right: str, wrong: str) -> Breaks:
    """Another text in a script or statement."""

    def breaks(patch: pytest.MonkeyPatch) -> None:
        text: str = getattr(owner, name)
        assert text.count(right) == 1, f"{name} has changed"
        patch.setattr(owner, name, text.replace(right, wrong))

    return breaks


def _enqueue_once(broker: Any, message: Any, delay: int | None = None) -> None:
    broker.enqueue(message, delay=delay)


def _ignore_what_was_given(self: Any, broker: Any, message: Any, exception: Any, given: timedelta) -> timedelta:
    return retries.delay_before(message.options["retries"] - 1)


def _count_no_retry(patch: pytest.MonkeyPatch) -> None:
    after = retries.Retries.after_process_message

    def after_process_message(self: Any, broker: Any, message: Any, **outcome: Any) -> None:
        message.options["retries"] = message.options.get("retries", 0) - 1
        after(self, broker, message, **outcome)

    patch.setattr(retries.Retries, "after_process_message", after_process_message)


def _keep_the_time_of_the_schedule(patch: pytest.MonkeyPatch) -> None:
    claim = Schedule.claim

    def keep(self: Any, broker: Any, message: Any) -> Any:
        claimed = claim(self, broker, message)
        return claimed.copy(options={"scheduled_at": message.options["scheduled_at"]})

    patch.setattr(Schedule, "claim", keep)


def _never_leave(patch: pytest.MonkeyPatch) -> None:
    def run(self: Any, inside: Any, function: Callable[[], Any]) -> Any:
        self._inside[inside.thread_id] = inside
        return function()

    patch.setattr(ShutdownNotifications, "_run", run)
    patch.setattr(interruption, "_leave", lambda thread_id: None)


def _call_being_put_back_an_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(patience, "PutBack", _Never)
    patch.setattr(patience, "Shutdown", _Never)


def _leave_out_what_cannot_be_read(patch: pytest.MonkeyPatch) -> None:
    newest = on_redis.RedisDeadLetters.newest
    patch.setattr(
        on_redis.RedisDeadLetters, "newest", lambda self, limit: [each for each in newest(self, limit) if each.message]
    )


def _requeue_those_there_are(patch: pytest.MonkeyPatch) -> None:
    def found(store: Any, ids: Any) -> list[Any]:
        return [letter for letter in store.find(set(ids)).values() if letter.message]

    patch.setattr(letters, "found", found)


TWINS: Final[list[Twin]] = [
    Twin(
        "R1",
        "retries_at_once",
        f"{_RETRIES}test_the_first_retry_comes_after_a_quarter_of_a_minute",
        _instead(retries, "delay_before", lambda retry: timedelta(seconds=1)),
    ),
    Twin(
        "R1",
        "waits_longer_than_the_period",
        f"{_RETRIES}test_a_late_retry_of_a_scheduled_actor_waits_no_longer_than_its_period",
        _instead(retries.Retries, "_delay", _ignore_what_was_given),
    ),
    Twin(
        "R1",
        "has_its_own_way_with_delays",
        f"{_RETRIES}test_delays_given_by_the_actor_or_the_exception_win",
        _instead(retries.Retries, "_delay", _ignore_what_was_given),
    ),
    Twin(
        "R1",
        "retries_without_end",
        f"{_RETRIES}test_after_the_last_retry_comes_the_dead_letter",
        _count_no_retry,
    ),
    Twin(
        "R1",
        "keeps_an_eleventh_dead_letter",
        f"{_RETRIES}test_only_the_last_ten_dead_letters_of_a_scheduled_actor_are_kept",
        _instead(dead_letters, "KEPT", 11),
    ),
    Twin(
        "R2",
        "lets_retries_pile_up",
        f"{_RETRIES}test_a_failing_schedule_runs_on_with_one_retry_waiting",
        _instead(retries.Retries, "_another_waits", lambda self, mark, message_id, delay: False),
    ),
    Twin(
        "R2",
        "never_takes_the_mark_away",
        f"{_RETRIES}test_a_retry_that_runs_makes_room_for_another",
        _instead(retries.Retries, "before_process_message", lambda self, broker, message: None),
    ),
    Twin(
        "R2",
        "stops_the_schedule_for_hours",
        f"{_RETRIES}test_failures_do_not_stop_a_schedule_for_longer_than_a_period",
        _instead(retries.Retries, "_delay", _ignore_what_was_given),
    ),
    Twin(
        "R3",
        "leaves_the_time_that_periodiq_skips_by",
        f"{_FOLDER}test_schedule.py::test_late_messages_and_retries_run_even_with_periodiqs_own_middleware",
        _keep_the_time_of_the_schedule,
        slow=True,
    ),
    Twin(
        "R4",
        "sends_what_follows_only_once",
        f"{_FOLLOW_UPS}test_what_follows_a_message_waits_for_redis",
        _instead(patience, "enqueue_at_last", _enqueue_once),
        slow=True,
    ),
    Twin(
        "R4",
        "enqueues_a_retry_only_once",
        f"{_RETRIES}test_a_retry_waits_for_redis_and_no_interrupt_makes_it_give_up",
        _instead(retries, "enqueue_at_last", _enqueue_once),
        slow=True,
    ),
    Twin(
        "R4",
        "counts_again_what_got_no_answer",
        f"{_FOLLOW_UPS}test_a_group_whose_count_gets_no_answer_ends_once_all_of_it_is_done",
        _in_text(group_callbacks, "_COUNT", "if told then return tonumber(told) end", ""),
    ),
    Twin(
        "R4",
        "counts_a_second_delivery",
        f"{_FOLLOW_UPS}test_a_member_of_a_group_that_is_delivered_twice_counts_once",
        lambda patch: (
            _in_text(group_callbacks, "_COUNT", "if told then return tonumber(told) end", "")(patch),
            patch.setattr(Idempotency, "before_process_message", lambda self, broker, message: None),
        )[0],
    ),
    Twin(
        "R4",
        "does_not_yield_to_the_one_that_waits",
        f"{_STORMS}test_retries_of_until_executing_that_come_due_together_make_one_run",
        _instead(deduplication_options, "_WAITED_FOR", ("redis_message_id",)),
    ),
    Twin(
        "R5",
        "takes_a_shutdown_for_a_failure",
        f"{_SHUTDOWN}test_an_actor_is_interrupted_after_the_grace_and_put_back",
        _instead(retries, "Shutdown", _Never),
    ),
    Twin(
        "R5",
        "tells_of_a_failure_that_is_none",
        f"{_FOLLOW_UPS}test_a_message_that_goes_back_to_the_queue_has_no_callback_yet",
        _call_being_put_back_an_end,
    ),
    Twin(
        "R5",
        "interrupts_what_comes_after_the_actor",
        f"{_SHUTDOWN}test_a_thread_in_its_after_hooks_is_never_interrupted",
        _never_leave,
    ),
    Twin(
        "R5",
        "waits_for_the_statement",
        f"{_STATEMENTS}test_an_actor_that_takes_the_cancelled_statement_for_its_own_error_is_put_back_too",
        _instead(statements, "_cancel", lambda connection: False),
        slow=True,
    ),
    Twin(
        "R5",
        "cancels_the_statements_of_others",
        f"{_STATEMENTS}test_only_statements_within_an_actor_are_cancelled",
        _in_text(statements, "_CANCEL", "pid = %s", "pid IS DISTINCT FROM -%s AND query LIKE 'DO %%pg_sleep%%'"),
    ),
    Twin(
        "R5",
        "cancels_a_commit",
        f"{_STATEMENTS}test_a_commit_is_not_cancelled",
        _in_text(statements, "_CANCEL", "(commit|end)", "nothing"),
    ),
    Twin(
        "R5",
        "does_not_tell_a_sweep_to_stop",
        "tests/acceptance/test_worker_process.py::test_a_sweep_told_to_stop_goes_on_where_it_stopped",
        _instead(RunLog, "before_worker_shutdown", lambda self, broker, worker: None),
        in_processes=True,
        slow=True,
    ),
    Twin(
        "R6",
        "forgets_the_last_error",
        f"{_LOOKING}test_a_dead_letter_says_what_it_died_of",
        _instead(dead_letters.DeadLetters, "before_nack", lambda self, broker, message: None),
    ),
    Twin(
        "R6",
        "lists_only_what_it_can_read",
        f"{_LOOKING}test_what_nothing_can_read_is_listed_by_the_brokers_id_with_the_reason",
        _leave_out_what_cannot_be_read,
    ),
    Twin(
        "R6",
        "lives_on_where_it_died",
        f"{_REQUEUEING}test_a_requeued_message_begins_a_new_life_as_the_same_message",
        _instead(letters, "_OLD_LIFE", frozenset()),
    ),
    Twin(
        "R6",
        "requeues_a_duplicate",
        f"{_REQUEUEING}test_a_duplicate_of_a_live_message_stays_a_dead_letter",
        _instead(letters, "as_new", lambda message: message),
    ),
    Twin(
        "R6",
        "does_half_of_what_it_was_asked",
        f"{_REQUEUEING}test_with_one_wrong_id_nothing_is_done_to_any",
        _requeue_those_there_are,
    ),
    Twin(
        "R6",
        "copies_instead_of_moving",
        f"{_REQUEUEING}test_of_two_operators_at_once_one_requeues",
        _in_text(on_redis, "_MOVE", 'redis.call("zrem", KEYS[1], ARGV[1]) == 0', 'ARGV[1] == ""'),
    ),
    Twin(
        "R6",
        "asks_again_as_if_for_another",
        f"{_REQUEUEING}test_an_answer_that_was_lost_once_doubles_nothing",
        _in_text(on_redis, "_MOVE", 'redis.call("hexists", KEYS[4], ARGV[2])', "0"),
    ),
    Twin(
        "R6",
        "lets_a_message_speak_to_the_terminal",
        f"{_COMMAND}test_one_is_shown_whole_without_its_secrets_and_without_obeying_it",
        _instead(printable, "_visible", lambda character: character),
        in_processes=True,
        slow=True,
    ),
    Twin(
        "F10",
        "keeps_every_message_of_a_storm",
        f"{_STORMS}test_a_storm_of_retries_of_one_key_keeps_one_message_and_has_one_effect",
        _instead(deduplication_options, "_WAITED_FOR", ("redis_message_id",)),
    ),
    Twin(
        "F10",
        "retries_beside_the_retry",
        f"{_STORMS}test_however_often_failed_attempts_are_delivered_again_one_copy_waits_and_it_keeps_its_key",
        _in_text(idempotency, "_BEGIN", '> tonumber(ARGV[3]) then return "retried" end', "< 0 then return 1 end"),
    ),
    Twin(
        "F10",
        "frees_the_key_of_the_retry",
        f"{_STORMS}test_a_redelivery_leaves_the_key_to_the_retry_that_waits",
        _instead(deduplication, "SUPERSEDED", "nothing"),
    ),
    Twin(
        "F10",
        "runs_every_copy_there_is",
        f"{_STORMS}test_a_copy_that_a_kill_has_made_is_gone_with_the_next_attempt",
        _in_text(idempotency, "_END", 'redis.call("set", KEYS[3], ARGV[4], "px", ARGV[2])', ""),
    ),
    Twin(
        "F10",
        "takes_a_requeued_message_for_an_old_attempt",
        f"{_STORMS}test_a_dead_letter_that_was_requeued_is_not_taken_for_an_attempt_of_before",
        _instead(deduplication_options, "LIFE", "another_option"),
    ),
    Twin(
        "R2",
        "forgets_the_retry_that_waits",
        f"{_STORMS}test_a_redelivery_leaves_the_mark_of_a_schedules_retry",
        _instead(retries, "SUPERSEDED", "nothing"),
    ),
    Twin(
        "F10",
        "executes_what_was_completed",
        f"{_STORMS}test_redeliveries_of_a_message_that_was_completed_have_no_effect",
        _instead(Idempotency, "before_process_message", lambda self, broker, message: None),
    ),
]
