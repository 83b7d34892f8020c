"""Faults of idempotency (promises I1 to I4)."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, Final

import pytest

from housekeeping.core.errors import RunTakenOver
from housekeeping.middleware import idempotency
from housekeeping.middleware.idempotency import Idempotency
from housekeeping.sweeps import registration
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger import run_queries, run_start
from housekeeping.sweeps.stages.actions import Delete, Write
from tests.twins import Twin

_ONCE: Final = "tests/integration/middleware/test_idempotency.py::"
_AGAIN: Final = "tests/integration/middleware/test_second_deliveries.py::"
_ASLEEP: Final = "tests/integration/middleware/test_sleeping_deliveries.py::"
_RUNS: Final = "tests/integration/sweeps/engine/test_runner.py::"


def _records_no_completion(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(idempotency, "_END", 'redis.call("del", KEYS[2])')


def _ignores_completions_in_the_ledger(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_queries, "completed", lambda message_id: False)


def _runs_a_second_delivery(patch: pytest.MonkeyPatch) -> None:
    begin = """
    if redis.call("exists", KEYS[1]) == 1 then return "completed" end
    redis.call("set", KEYS[2], ARGV[1], "px", ARGV[2])
    return ARGV[1]
    """
    patch.setattr(idempotency, "_BEGIN", begin)


def _never_interrupts_a_sleeping_delivery(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Idempotency, "_renew_mark", lambda self, delivery: True)


def _starts_without_rechecking_the_running_mark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Idempotency, "_check_mark_first", lambda self, function: function)


def _records_completion_after_a_takeover(patch: pytest.MonkeyPatch) -> None:
    def run(sweep: Any, *argument: Any) -> RunResult:
        result = run_sweep(sweep, *argument)
        return dataclasses.replace(result, error=None) if isinstance(result.error, RunTakenOver) else result

    patch.setattr(registration, "run_sweep", run)


def _starts_without_locking_the_message_id(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_start, "_lock_message", lambda message_id: None)


def _renews_the_mark_after_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(idempotency._Delivery, "end", lambda self: None)


def _never_restores_a_lost_mark(patch: pytest.MonkeyPatch) -> None:
    def renewed(self: Any, name: str, token: str) -> bool:
        return bool(self._marks.renew(name, token, idempotency.RUNNING_TTL))

    patch.setattr(Idempotency, "_renew_or_restore", renewed)


def _ignores_idempotency_keys_of_messages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Idempotency, "_name", lambda self, message: f"{message.actor_name}:{message.message_id}")


def _shares_idempotency_keys_between_actors(patch: pytest.MonkeyPatch) -> None:
    def name(self: Any, message: Any) -> str:
        whole = f"{message.actor_name}:{message.options['idempotency_key']}"
        return hashlib.sha256(whole.encode()).hexdigest()

    patch.setattr(Idempotency, "_name", name)


def _updates_rows_instead_of_deleting_them(patch: pytest.MonkeyPatch) -> None:
    def write(self: Any, table: Any, step: Any, chosen: Any) -> Write:
        (column, *_), key = table.order, table.key
        touch: Any = table.model.update({column: column}).where(chosen).returning(*key)
        return Write([touch.cte("deleted")], self.counted_as)

    patch.setattr(Delete, "write", write)


TWINS: Final[list[Twin]] = [
    Twin(
        "I1",
        "starts_without_locking_the_message_id",
        "tests/integration/sweeps/engine/test_second_deliveries.py::"
        "test_delayed_delivery_of_a_completed_message_starts_no_run",
        _starts_without_locking_the_message_id,
    ),
    Twin(
        "I1",
        "starts_without_rechecking_the_running_mark",
        _ASLEEP + "test_delivery_that_slept_before_its_actor_does_not_repeat_the_work",
        _starts_without_rechecking_the_running_mark,
    ),
    Twin(
        "I1",
        "records_completion_after_a_takeover",
        _ASLEEP + "test_run_that_was_taken_over_leaves_the_completion_to_its_successor",
        _records_completion_after_a_takeover,
    ),
    Twin(
        "I1",
        "records_no_completion",
        _ONCE + "test_completed_message_is_not_executed_again",
        _records_no_completion,
    ),
    Twin(
        "I1",
        "ignores_completions_in_the_ledger",
        _RUNS + "test_completed_message_is_not_run_again_without_redis",
        _ignores_completions_in_the_ledger,
    ),
    Twin(
        "I2",
        "runs_a_second_delivery",
        _ONCE + "test_second_delivery_waits_and_finds_the_work_done",
        _runs_a_second_delivery,
    ),
    Twin(
        "I2",
        "never_interrupts_a_sleeping_delivery",
        _AGAIN + "test_sleeping_delivery_is_interrupted_when_another_one_runs",
        _never_interrupts_a_sleeping_delivery,
        slow=True,
    ),
    Twin(
        "I2",
        "never_restores_a_lost_mark",
        _AGAIN + "test_mark_lost_by_redis_is_restored_during_the_run",
        _never_restores_a_lost_mark,
    ),
    Twin(
        "I2",
        "renews_the_mark_after_the_end",
        _AGAIN + "test_renewal_during_the_end_of_a_message_leaves_no_mark",
        _renews_the_mark_after_the_end,
    ),
    Twin(
        "I3",
        "ignores_idempotency_keys_of_messages",
        _ONCE + "test_two_messages_with_an_applications_key_have_one_effect",
        _ignores_idempotency_keys_of_messages,
    ),
    Twin(
        "I4",
        "updates_rows_instead_of_deleting_them",
        "tests/integration/workers/user_status_cleanup/test_worker.py::test_a_second_run_finds_nothing_to_do",
        _updates_rows_instead_of_deleting_them,
    ),
    Twin(
        "I3",
        "shares_idempotency_keys_between_actors",
        _ONCE + "test_applications_key_is_scoped_to_its_actor",
        _shares_idempotency_keys_between_actors,
    ),
]
