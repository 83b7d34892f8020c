"""Tests of this folder that need Redis as the broker; ``--broker=rabbitmq`` skips them."""

from __future__ import annotations

from typing import Final

_ONE_SCRIPT = "one Redis script writes message and key; with RabbitMQ the key is reserved before"
_COUNTED = "it counts commands of Redis, which does not get RabbitMQ's messages"
_GONE = "Redis loses its data, but RabbitMQ still has its messages"
_RETRY = "RabbitMQ accepts a retry while Redis does not answer"
_OTHER_FAULT = "it breaks a command of the Redis broker"

#: By file and name, with a parameter's id where it is only that one.
REASONS: Final = {
    "deduplication/test_enqueueing.py::"
    "test_wherever_a_sender_dies_message_and_key_are_both_there_or_neither": _ONE_SCRIPT,
    "deduplication/test_enqueueing.py::test_a_send_whose_answer_is_lost_enqueues_once": _ONE_SCRIPT,
    "deduplication/test_enqueueing.py::"
    "test_a_call_that_is_repeated_because_its_answer_was_lost_enqueues_once": _ONE_SCRIPT,
    "deduplication/test_enqueueing.py::"
    "test_a_message_that_is_enqueued_again_because_its_answer_was_lost_is_there_once": _ONE_SCRIPT,
    "deduplication/test_enqueueing.py::"
    "test_a_message_that_left_its_queue_for_the_dead_letters_may_be_enqueued_again": _OTHER_FAULT,
    "deduplication/test_limits.py::test_a_message_costs_no_more_round_trips_than_its_steps": _COUNTED,
    "deduplication/test_limits.py::test_without_redis_nothing_is_sent_unprotected": _ONE_SCRIPT,
    "test_enqueueing.py::test_a_sender_other_than_the_scheduler_is_told_that_redis_is_away": _RETRY,
    "test_retries.py::test_only_the_last_ten_dead_letters_of_a_scheduled_actor_are_kept": (
        "RabbitMQ cannot take out single dead letters; all are kept for a week"
    ),
    "test_retries.py::test_a_retry_waits_for_redis_and_no_interrupt_makes_it_give_up": _RETRY,
    "schedule/test_schedule.py::test_a_tick_sent_again_after_redis_came_back_empty_is_the_same_message": _GONE,
    "schedule/test_schedule.py::test_a_scheduler_outlives_redis_and_fires_the_next_tick": _GONE,
    "schedule/test_killed.py::"
    "test_a_scheduler_killed_anywhere_leaves_each_tick_one_outcome[worker_at_once-within_the_enqueue]": _OTHER_FAULT,
    "schedule/test_killed.py::"
    "test_a_scheduler_killed_anywhere_leaves_each_tick_one_outcome[worker_later-within_the_enqueue]": _OTHER_FAULT,
    "schedule/test_killed.py::test_a_scheduler_killed_anywhere_for_good_leaves_each_tick_one_outcome"
    "[worker_at_once-within_the_enqueue]": _OTHER_FAULT,
    "schedule/test_killed.py::test_a_scheduler_killed_anywhere_for_good_leaves_each_tick_one_outcome"
    "[worker_later-within_the_enqueue]": _OTHER_FAULT,
    "schedule/test_redis_unavailable.py::test_a_scheduler_that_loses_redis_anywhere_goes_on_and_each_tick_has_one_outcome"
    "[not_heard-_execute]": _OTHER_FAULT,
    "schedule/test_redis_unavailable.py::test_a_scheduler_that_loses_redis_anywhere_goes_on_and_each_tick_has_one_outcome"
    "[not_answered-_execute]": _OTHER_FAULT,
    "schedule/test_redis_unavailable.py::test_a_tick_whose_message_came_into_the_queue_twice_runs_once": _OTHER_FAULT,
    "interrupts/test_shutdown.py::test_an_actor_is_interrupted_after_the_grace_and_put_back": (
        "it looks into Redis' queue; tests/acceptance/test_worker_process.py has it with RabbitMQ"
    ),
}
