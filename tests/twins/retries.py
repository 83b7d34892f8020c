"""Faults of retries and of the shutdown (promises R1 to R5, F10)."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.internals.middleware import Schedule, delivery, retries
from tests.twins import Twin
from tests.twins.planting import in_text, instead

_FOLDER: Final = "tests/integration/middleware/"
_RETRIES: Final = f"{_FOLDER}test_retries.py::"
_FOLLOW_UPS: Final = f"{_FOLDER}test_follow_ups.py::"
_STORMS: Final = f"{_FOLDER}test_retry_storms.py::"
_SHUTDOWN: Final = "tests/integration/middleware/interrupts/test_shutdown.py::"


def _enqueue_once(broker: Any, message: Any, delay: int | None = None) -> None:
    broker.enqueue(message, delay=delay)


def _keep_the_time_of_the_schedule(patch: pytest.MonkeyPatch) -> None:
    claim = Schedule.claim

    def keep(self: Any, broker: Any, message: Any) -> Any:
        claimed = claim(self, broker, message)
        return claimed.copy(options={"scheduled_at": message.options["scheduled_at"]})

    patch.setattr(Schedule, "claim", keep)


class _Never(Exception):
    """Error that is never raised."""


TWINS: Final[list[Twin]] = [
    Twin(
        "R2",
        "accumulates_retries",
        f"{_RETRIES}test_failing_schedule_continues_with_one_waiting_retry",
        instead(retries.Retries, "_another_waits", lambda self, mark, message_id, delay: False),
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
        "tries_once_to_enqueue_a_retry",
        f"{_RETRIES}test_retry_waits_for_redis_through_interrupts",
        instead(retries, "enqueue_reliably", _enqueue_once),
        slow=True,
    ),
    Twin(
        "R4",
        "counts_a_second_delivery",
        f"{_FOLLOW_UPS}test_group_member_delivered_twice_counts_once",
        in_text(retries, "_COUNT", "if answered then return tonumber(answered) end", ""),
    ),
    Twin(
        "F10",
        "executes_completed_messages",
        f"{_STORMS}test_redeliveries_of_a_completed_message_have_no_effect",
        in_text(delivery, "_BEGIN", 'if completed then return "completed:" .. completed end', ""),
    ),
    Twin(
        "R5",
        "treats_a_shutdown_as_a_failure",
        f"{_SHUTDOWN}test_actor_is_interrupted_after_the_grace_and_requeued",
        instead(retries, "Shutdown", _Never),
    ),
]
