"""Faults of leases and epochs (promises L1 to L6)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.internals.core import LeaseLost
from tests.internals.database import database
from tests.internals.leases import Fence, Holder, LeaseRow, lease, renewal
from tests.internals.middleware import Admission
from tests.internals.middleware import delivery as admission
from tests.twins import Twin
from tests.twins.planting import instead

_LEASES: Final = "tests/integration/leases/test_leases.py::"
_ACTORS: Final = "tests/integration/middleware/test_exclusive_lease.py::"
_LOST: Final = "tests/integration/middleware/test_lost_leases.py::"
_FENCES: Final = "tests/integration/leases/test_fences.py::"


def _grants_a_held_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(renewal, "_OBTAIN", 'redis.call("set", KEYS[1], given.token, "px", given.ttl) return given.token')


def _starts_without_its_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "_check_held", lambda self, delivery: None)


def _passes_over_errors(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def passing() -> Iterator[None]:
        with contextlib.suppress(Exception):
            yield

    patch.setattr(admission, "fail_message_on_error", passing)
    _starts_without_its_lease(patch)  # which would stop the actor as well


def _checks_the_epoch_without_a_lock(patch: pytest.MonkeyPatch) -> None:
    def check_epoch(fence: Fence, connection: Any = None) -> None:
        query = f'SELECT 1 FROM "{LeaseRow._meta.schema}".leases WHERE key = %s AND epoch = %s AND holder = %s'
        if database.execute_sql(query, fence).fetchone() is None:
            raise LeaseLost

    patch.setattr(lease, "check_epoch", check_epoch)


TWINS: Final[list[Twin]] = [
    Twin("L1", "grants_a_held_lease", _ACTORS + "test_of_many_concurrent_messages_one_runs", _grants_a_held_lease),
    Twin(
        "L2",
        "starts_without_its_lease",
        _LOST + "test_actor_that_lost_its_lease_before_it_began_does_not_begin",
        _starts_without_its_lease,
    ),
    Twin(
        "L4",
        "drops_the_message_of_a_dead_attempt",
        _LOST + "test_message_blocked_by_its_dead_attempts_lease_is_retried",
        instead(admission, "holder_of", lambda token: Holder()),
    ),
    Twin(
        "L5",
        "runs_an_actor_without_redis",
        _ACTORS + "test_without_redis_the_message_fails_is_retried_and_does_not_run",
        _passes_over_errors,
    ),
    Twin(
        "L6",
        "allows_a_lease_in_a_transaction",
        _LEASES + "test_lease_in_an_open_transaction_raises",
        instead(lease, "in_transaction", lambda: False),
    ),
    Twin(
        "L3",
        "checks_the_epoch_without_a_lock",
        _FENCES + "test_next_epoch_waits_for_a_fenced_transaction_to_end",
        _checks_the_epoch_without_a_lock,
    ),
]
