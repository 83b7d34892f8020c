"""Faults of idempotency (promises I1 to I4)."""

from __future__ import annotations

from typing import Any, Final

import pytest

from housekeeping import Delete
from tests.internals.middleware import delivery
from tests.internals.sweeps import Write
from tests.twins import Twin

_ONCE: Final = "tests/integration/middleware/test_idempotency.py::"


def _records_no_completion(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delivery, "_END", 'redis.call("del", KEYS[2])')


def _runs_a_second_delivery(patch: pytest.MonkeyPatch) -> None:
    begin = """
    local completed = redis.call("get", KEYS[1])
    if completed then return "completed:" .. completed end
    redis.call("set", KEYS[2], given.token, "px", given.ttl)
    return given.token
    """
    patch.setattr(delivery, "_BEGIN", begin)


def _ignores_idempotency_keys_of_messages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delivery, "_name", lambda message: f"{message.actor_name}:{message.message_id}")


def _updates_rows_instead_of_deleting_them(patch: pytest.MonkeyPatch) -> None:
    def write(self: Any, table: Any, step: Any, chosen: Any) -> Write:
        (column, *_), key = table.order, table.key
        touch: Any = table.model.update({column: column}).where(chosen).returning(*key)
        return Write([touch.cte("deleted")], self.counted_as)

    patch.setattr(Delete, "write", write)


def _completes_without_a_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delivery, "_COMPLETE", delivery._COMPLETE.replace("WHERE earlier.expires_at <=", "WHERE now() <="))


TWINS: Final[list[Twin]] = [
    Twin(
        "I1",
        "records_a_completion_twice",
        "tests/integration/middleware/test_completions.py::"
        "test_completion_commits_and_rolls_back_with_each_kind_of_connection",
        _completes_without_a_look,
    ),
    Twin(
        "I1",
        "records_no_completion",
        _ONCE + "test_completed_message_is_not_executed_again",
        _records_no_completion,
    ),
    Twin(
        "I2",
        "runs_a_second_delivery",
        _ONCE + "test_second_delivery_waits_and_finds_the_work_done",
        _runs_a_second_delivery,
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
        "tests/integration/purge/test_purge.py::test_second_purge_finds_nothing",
        _updates_rows_instead_of_deleting_them,
    ),
]
