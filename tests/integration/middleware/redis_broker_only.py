"""The tests of this folder that are about Redis as the broker; ``--broker=rabbitmq`` leaves them out."""

from __future__ import annotations

from typing import Final

_ONE_SCRIPT = "message and key are taken by one script of Redis; with RabbitMQ a key is reserved for seconds before"
_COUNTED = "it counts what goes to Redis, where RabbitMQ's messages do not go"
_GONE = "Redis comes back empty, but RabbitMQ still has its messages"
_RETRY = "RabbitMQ takes a retry while Redis is away"
_OTHER_FAULT = "it breaks a command of Redis' broker"

#: By file and name, with a parameter's id where it is only that one.
REASONS: Final = {
    "test_deduplication_enqueueing.py::"
    "test_wherever_a_sender_dies_message_and_key_are_both_there_or_neither": _ONE_SCRIPT,
    "test_deduplication_enqueueing.py::test_a_send_whose_answer_is_lost_enqueues_once": _ONE_SCRIPT,
    "test_deduplication_enqueueing.py::"
    "test_a_call_that_is_repeated_because_its_answer_was_lost_enqueues_once": _ONE_SCRIPT,
    "test_deduplication_enqueueing.py::"
    "test_a_message_that_is_enqueued_again_because_its_answer_was_lost_is_there_once": _ONE_SCRIPT,
    "test_deduplication_enqueueing.py::"
    "test_a_message_that_left_its_queue_for_the_dead_letters_may_be_enqueued_again": _OTHER_FAULT,
    "test_deduplication_limits.py::test_a_message_costs_no_more_round_trips_than_its_steps": _COUNTED,
    "test_deduplication_limits.py::test_without_redis_nothing_is_sent_unprotected": _ONE_SCRIPT,
    "test_enqueueing.py::test_a_sender_other_than_the_scheduler_is_told_that_redis_is_away": _RETRY,
    "test_retries.py::test_only_the_last_ten_dead_letters_of_a_scheduled_actor_are_kept": (
        "RabbitMQ cannot take out single dead letters; all are kept for a week"
    ),
    "test_retries.py::test_a_retry_waits_for_redis_and_no_interrupt_makes_it_give_up": _RETRY,
    "test_schedule.py::test_a_tick_sent_again_after_redis_came_back_empty_is_the_same_message": _GONE,
    "test_schedule.py::test_a_scheduler_outlives_redis_and_fires_the_next_tick": _GONE,
    "test_schedule_killed.py::"
    "test_a_scheduler_killed_anywhere_leaves_each_tick_one_outcome[worker_at_once-within_the_enqueue]": _OTHER_FAULT,
    "test_schedule_killed.py::"
    "test_a_scheduler_killed_anywhere_leaves_each_tick_one_outcome[worker_later-within_the_enqueue]": _OTHER_FAULT,
    "test_schedule_killed.py::test_a_scheduler_killed_anywhere_for_good_leaves_each_tick_one_outcome"
    "[worker_at_once-within_the_enqueue]": _OTHER_FAULT,
    "test_schedule_killed.py::test_a_scheduler_killed_anywhere_for_good_leaves_each_tick_one_outcome"
    "[worker_later-within_the_enqueue]": _OTHER_FAULT,
    "test_schedule_redis_away.py::test_a_scheduler_that_loses_redis_anywhere_goes_on_and_each_tick_has_one_outcome"
    "[not_heard-do_enqueue]": _OTHER_FAULT,
    "test_schedule_redis_away.py::test_a_scheduler_that_loses_redis_anywhere_goes_on_and_each_tick_has_one_outcome"
    "[not_answered-do_enqueue]": _OTHER_FAULT,
    "test_schedule_redis_away.py::test_a_tick_whose_message_came_into_the_queue_twice_runs_once": _OTHER_FAULT,
    "test_shutdown.py::test_an_actor_is_interrupted_after_the_grace_and_put_back": (
        "it looks into Redis' queue; tests/acceptance/test_worker_process.py has it with RabbitMQ"
    ),
}
