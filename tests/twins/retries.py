"""Faults of retries (promises R1 to R4, F10)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import pytest

from housekeeping.middleware import group_callbacks, idempotency, reliable_enqueue, retries
from housekeeping.middleware.dead_letters import DeadLetters
from housekeeping.middleware.deduplication import middleware, options
from housekeeping.middleware.idempotency import Idempotency
from housekeeping.middleware.schedule.middleware import Schedule
from tests.twins import Twin
from tests.twins.planting import in_text, instead

_FOLDER: Final = "tests/integration/middleware/"
_RETRIES: Final = f"{_FOLDER}test_retries.py::"
_FOLLOW_UPS: Final = f"{_FOLDER}test_follow_ups.py::"
_STORMS: Final = f"{_FOLDER}test_retry_storms.py::"


def _enqueue_once(broker: Any, message: Any, delay: int | None = None) -> None:
    broker.enqueue(message, delay=delay)


def _ignore_given_delays(self: Any, broker: Any, message: Any, exception: Any, given: timedelta) -> timedelta:
    return retries.delay_before(message.options["retries"] - 1)


def _keep_the_time_of_the_schedule(patch: pytest.MonkeyPatch) -> None:
    claim = Schedule.claim

    def keep(self: Any, broker: Any, message: Any) -> Any:
        claimed = claim(self, broker, message)
        return claimed.copy(options={"scheduled_at": message.options["scheduled_at"]})

    patch.setattr(Schedule, "claim", keep)


TWINS: Final[list[Twin]] = [
    Twin(
        "R1",
        "retries_at_once",
        f"{_RETRIES}test_first_retry_comes_after_15_seconds",
        instead(retries, "delay_before", lambda retry: timedelta(seconds=1)),
    ),
    Twin(
        "R1",
        "waits_longer_than_the_period",
        f"{_RETRIES}test_late_retry_of_a_scheduled_actor_waits_no_longer_than_its_period",
        instead(retries.Retries, "_delay", _ignore_given_delays),
    ),
    Twin(
        "R1",
        "ignores_delays_of_actors_and_exceptions",
        f"{_RETRIES}test_delays_given_by_the_actor_or_the_exception_win",
        instead(retries.Retries, "_delay", _ignore_given_delays),
    ),
    Twin(
        "R1",
        "delays_rediscovered_work_for_hours",
        f"{_RETRIES}test_late_retry_of_rediscovered_work_waits_ten_minutes",
        instead(retries, "REDISCOVERED_DELAY", timedelta(hours=6)),
    ),
    Twin(
        "R1",
        "counts_a_retry_that_did_not_happen",
        f"{_RETRIES}test_last_failed_retry_makes_a_dead_letter",
        instead(DeadLetters, "before_process_message", lambda self, broker, message: None),
    ),
    Twin(
        "R2",
        "accumulates_retries",
        f"{_RETRIES}test_failing_schedule_continues_with_one_waiting_retry",
        instead(retries.Retries, "_another_waits", lambda self, mark, message_id, delay: False),
    ),
    Twin(
        "R2",
        "never_clears_the_mark_of_a_retry",
        f"{_RETRIES}test_running_retry_makes_room_for_another",
        instead(retries.Retries, "before_process_message", lambda self, broker, message: None),
    ),
    Twin(
        "R2",
        "stops_the_schedule_for_hours",
        f"{_RETRIES}test_failures_pause_a_schedule_for_one_period_at_most",
        instead(retries.Retries, "_delay", _ignore_given_delays),
    ),
    Twin(
        "R3",
        "keeps_the_time_that_periodiq_skips_by",
        "tests/integration/middleware/schedule/test_schedule.py::test_late_messages_and_retries_run_with_periodiqs_middleware",
        _keep_the_time_of_the_schedule,
        slow=True,
    ),
    Twin(
        "R4",
        "tries_once_to_send_follow_ups",
        f"{_FOLLOW_UPS}test_follow_up_waits_for_redis",
        instead(reliable_enqueue, "enqueue_reliably", _enqueue_once),
        slow=True,
    ),
    Twin(
        "R4",
        "tries_once_to_enqueue_a_retry",
        f"{_RETRIES}test_retry_waits_for_redis_through_interrupts",
        instead(retries, "enqueue_reliably", _enqueue_once),
        slow=True,
    ),
    Twin(
        "R4",
        "counts_again_after_a_lost_answer",
        f"{_FOLLOW_UPS}test_group_whose_count_gets_no_answer_completes_once",
        in_text(group_callbacks, "_COUNT", "if answered then return tonumber(answered) end", ""),
    ),
    Twin(
        "R4",
        "counts_a_second_delivery",
        f"{_FOLLOW_UPS}test_group_member_delivered_twice_counts_once",
        lambda patch: (
            in_text(group_callbacks, "_COUNT", "if answered then return tonumber(answered) end", "")(patch),
            patch.setattr(Idempotency, "before_process_message", lambda self, broker, message: None),
        )[0],
    ),
    Twin(
        "R4",
        "retries_a_refused_count_forever",
        f"{_FOLLOW_UPS}test_group_count_refused_by_redis_makes_a_dead_letter",
        instead(reliable_enqueue, "_REFUSED", ()),
    ),
    Twin(
        "R4",
        "runs_beside_a_waiting_message",
        f"{_STORMS}test_until_executing_retries_that_come_due_together_make_one_run",
        instead(options, "_WAITED_FOR", ("redis_message_id",)),
    ),
    Twin(
        "F10",
        "drops_no_duplicate_of_a_storm",
        f"{_STORMS}test_retry_storm_of_one_key_keeps_one_message_and_has_one_effect",
        instead(options, "_WAITED_FOR", ("redis_message_id",)),
    ),
    Twin(
        "F10",
        "retries_beside_the_retry",
        f"{_STORMS}test_redelivered_failed_attempts_leave_one_copy_with_its_key",
        in_text(idempotency, "_BEGIN", '> tonumber(ARGV[3]) then return "retried" end', "< 0 then return 1 end"),
    ),
    Twin(
        "F10",
        "releases_the_key_of_the_retry",
        f"{_STORMS}test_redelivery_leaves_the_key_to_the_waiting_retry",
        instead(middleware, "SUPERSEDED", "nothing"),
    ),
    Twin(
        "F10",
        "runs_every_copy",
        f"{_STORMS}test_copy_made_by_a_kill_disappears_with_the_next_attempt",
        in_text(idempotency, "_END", 'redis.call("set", KEYS[3], ARGV[4], "px", ARGV[2])', ""),
    ),
    Twin(
        "F10",
        "treats_a_requeued_message_as_an_old_attempt",
        f"{_STORMS}test_requeued_dead_letter_does_not_count_as_an_earlier_attempt",
        instead(options, "LIFE", "another_option"),
    ),
    Twin(
        "R2",
        "forgets_the_waiting_retry",
        f"{_STORMS}test_redelivery_keeps_the_mark_of_a_schedules_retry",
        instead(retries, "SUPERSEDED", "nothing"),
    ),
    Twin(
        "F10",
        "executes_completed_messages",
        f"{_STORMS}test_redeliveries_of_a_completed_message_have_no_effect",
        instead(Idempotency, "prepare", lambda self, actor, message: None),
    ),
]
