"""Faults of the brokers and of dead letters (promises B1 to B3, R1, R6)."""

from __future__ import annotations

from typing import Any, Final

import pytest
from dramatiq import Message

from tests.internals.brokers import (
    Prefetch,
    ReliableRedisBroker,
    models,
    redis,
)
from tests.internals.brokers import broker as rabbitmq
from tests.internals.middleware import retries
from tests.twins import Twin
from tests.twins.planting import in_text, instead

_REDIS: Final = "tests/integration/brokers/redis/test_brokers.py::"
_UNREADABLE: Final = "tests/integration/brokers/dead_letters/test_unreadable.py::"
_LOST: Final = "tests/integration/brokers/redis/test_lost_deliveries.py::"
_SENDING: Final = "tests/integration/brokers/rabbitmq/test_sending.py::"
_FOLDER: Final = "tests/integration/middleware/"
_RETRIES: Final = f"{_FOLDER}test_retries.py::"
_REQUEUEING: Final = "tests/integration/brokers/dead_letters/test_requeueing.py::"


def _reads_all(body: bytes, queue_name: str) -> tuple[Message[Any] | None, str]:
    return Message.decode(body), ""


def _skips_validation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(redis, "_read", _reads_all)


def _requeues_no_lost_deliveries(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReliableRedisBroker, "requeue_lost_deliveries", lambda self, queue_name: None)


def _prefetches_two_per_thread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefetch, "before_worker_boot", lambda self, broker, worker: None)


def _tries_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rabbitmq, "_ATTEMPTS", 1)


def _count_no_retry(patch: pytest.MonkeyPatch) -> None:
    after = retries.Retries.after_process_message

    def after_process_message(self: Any, broker: Any, message: Any, **outcome: Any) -> None:
        message.options["retries"] = message.options.get("retries", 0) - 1
        after(self, broker, message, **outcome)

    patch.setattr(retries.Retries, "after_process_message", after_process_message)


TWINS: Final[list[Twin]] = [
    Twin(
        "B1",
        "never_requeues_lost_deliveries",
        _LOST + "test_delivery_lost_in_transit_is_repeated",
        _requeues_no_lost_deliveries,
        slow=True,
    ),
    Twin(
        "B1",
        "tries_a_send_once",
        _SENDING + "test_send_over_a_lost_connection_is_repeated",
        _tries_once,
    ),
    Twin(
        "B2",
        "prefetches_two_messages_per_thread",
        _REDIS + "test_message_behind_a_long_one_is_left_to_another_process",
        _prefetches_two_per_thread,
        slow=True,
    ),
    Twin(
        "B3",
        "skips_message_validation",
        _UNREADABLE + "test_unreadable_message_affects_no_other",
        _skips_validation,
        slow=True,
    ),
    Twin(
        "R1",
        "retries_without_end",
        f"{_RETRIES}test_last_failed_retry_makes_a_dead_letter",
        _count_no_retry,
    ),
    Twin(
        "R6",
        "requeues_with_the_options_of_earlier_attempts",
        f"{_REQUEUEING}test_requeued_message_keeps_its_id",
        instead(models, "_PAST_ATTEMPTS", frozenset()),
    ),
    Twin(
        "R6",
        "copies_instead_of_moving",
        f"{_REQUEUEING}test_of_two_concurrent_operators_one_requeues",
        in_text(redis, "_MOVE", 'redis.call("zrem", KEYS[1], ARGV[1]) == 0', 'ARGV[1] == ""'),
    ),
]
