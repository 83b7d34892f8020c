"""Tests of this folder that need Redis as the broker; ``--broker=rabbitmq`` skips them."""

from __future__ import annotations

from typing import Final

_ONE_SCRIPT = "one Redis script writes message and key; with RabbitMQ the key is reserved before"
_GONE_COPY = "Redis cannot see whether RabbitMQ still has the message"
_COUNTED = "it counts commands of Redis, which does not get RabbitMQ's messages"
_GONE = "Redis loses its data, but RabbitMQ still has its messages"
_RETRY = "RabbitMQ accepts a retry while Redis does not answer"
_OTHER_FAULT = "it breaks a command of the Redis broker"

#: By file and name, with a parameter's id if only that case needs Redis.
REASONS: Final = {
    "deduplication/test_enqueueing.py::test_sender_killed_anywhere_leaves_message_and_key_or_neither": _ONE_SCRIPT,
    "deduplication/test_enqueueing.py::test_send_repeated_after_lost_answer_enqueues_once": _ONE_SCRIPT,
    "deduplication/test_enqueueing.py::test_message_reenqueued_after_lost_answer_is_queued_once": _ONE_SCRIPT,
    "deduplication/test_enqueueing.py::test_dead_letter_may_be_enqueued_again": _OTHER_FAULT,
    "deduplication/test_outlived_keys.py::test_waiting_key_of_an_ended_message_stops_no_other": _GONE_COPY,
    "deduplication/test_outlived_keys.py::test_key_of_an_ended_run_stops_no_other_message": _GONE_COPY,
    "deduplication/test_outlived_keys.py::test_key_of_a_message_that_was_flushed_stops_no_other": _GONE_COPY,
    "deduplication/test_outlived_keys.py::test_key_of_a_delayed_message_that_was_flushed_stops_no_other": _GONE_COPY,
    "deduplication/test_outlived_keys.py::test_key_of_a_second_delivery_is_kept_while_it_runs": _GONE_COPY,
    "deduplication/test_limits.py::test_message_costs_no_more_round_trips_than_its_steps": _COUNTED,
    "test_enqueueing.py::test_unavailable_redis_raises_for_senders_other_than_the_scheduler": _RETRY,
    "test_retries.py::test_scheduled_actor_keeps_its_last_ten_dead_letters": (
        "RabbitMQ cannot take out single dead letters; all are kept for a week"
    ),
    "test_retries.py::test_retry_waits_for_redis_through_interrupts": _RETRY,
    "schedule/test_schedule.py::test_scheduler_outlives_a_redis_outage_and_fires_the_next_tick": _GONE,
    "schedule/test_killed.py::"
    "test_scheduler_killed_anywhere_leaves_each_tick_one_outcome[worker_at_once-within_the_enqueue]": _OTHER_FAULT,
    "schedule/test_killed.py::"
    "test_scheduler_killed_anywhere_leaves_each_tick_one_outcome[worker_later-within_the_enqueue]": _OTHER_FAULT,
    "schedule/test_killed.py::test_scheduler_killed_anywhere_for_good_leaves_each_tick_one_outcome"
    "[worker_at_once-within_the_enqueue]": _OTHER_FAULT,
    "schedule/test_killed.py::test_scheduler_killed_anywhere_for_good_leaves_each_tick_one_outcome"
    "[worker_later-within_the_enqueue]": _OTHER_FAULT,
    "schedule/test_redis_unavailable.py::test_scheduler_that_loses_redis_anywhere_leaves_each_tick_one_outcome"
    "[not_heard-enqueue]": _OTHER_FAULT,
    "schedule/test_redis_unavailable.py::test_scheduler_that_loses_redis_anywhere_leaves_each_tick_one_outcome"
    "[not_answered-enqueue]": _OTHER_FAULT,
    "schedule/test_redis_unavailable.py::test_tick_queued_twice_runs_once": _OTHER_FAULT,
    "interrupts/test_shutdown.py::test_actor_is_interrupted_after_the_grace_and_requeued": (
        "it looks into Redis' queue; tests/acceptance/test_worker_process.py has it with RabbitMQ"
    ),
}
