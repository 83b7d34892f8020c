"""Faults of leases and of actors that lose them (promises L1, L2, L4 to L6)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import pytest

from housekeeping.core import thread_interrupt
from housekeeping.core.middleware_errors import Requeue, StoreUnavailable
from housekeeping.core.redis.client import retry_redis
from housekeeping.leases import lease
from housekeeping.leases import store as lease_store
from housekeeping.leases.lease_token import Holder
from housekeeping.leases.renewal import Renewal
from housekeeping.middleware import admission, exclusive_lease
from tests.twins import Twin
from tests.twins.planting import instead

_LEASES: Final = "tests/integration/leases/test_leases.py::"
_GIVEN_BACK: Final = "tests/integration/leases/test_leases_given_back.py::"
_ACTORS: Final = "tests/integration/middleware/test_exclusive_lease.py::"
_LOST: Final = "tests/integration/middleware/test_lost_leases.py::"


def _grants_a_held_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease_store, "_OBTAIN", 'redis.call("set", KEYS[1], ARGV[1], "px", ARGV[2]) return ARGV[1]')


def _releases_the_lease_of_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease_store, "_RELEASE", 'return redis.call("del", KEYS[1])')


def _renews_the_lease_of_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease_store, "_RENEW", 'redis.call("pexpire", KEYS[1], ARGV[2]) return 1')


def _ends_no_interruptible_section(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(thread_interrupt, "_sections", {})
    patch.setattr(thread_interrupt, "_leave", lambda thread_id: None)


def _starts_without_its_lease(patch: pytest.MonkeyPatch) -> None:
    holding: Any = lambda self, function, *args, **kwargs: function(*args, **kwargs)  # noqa: E731
    patch.setattr(exclusive_lease.ExclusiveLeases, "_run_holding", holding)


def _retries_much_later(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exclusive_lease, "Requeue", lambda reason, after: Requeue(reason, 3 * after + timedelta(seconds=1)))


def _passes_over_errors(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def passing() -> Iterator[None]:
        with contextlib.suppress(Exception):
            yield

    patch.setattr(admission, "fail_message_on_error", passing)
    _starts_without_its_lease(patch)  # which would stop the actor as well


TWINS: Final[list[Twin]] = [
    Twin("L1", "grants_a_held_lease", _ACTORS + "test_of_many_concurrent_messages_one_runs", _grants_a_held_lease),
    Twin(
        "L1",
        "releases_the_lease_of_another",
        _LOST + "test_actor_that_lost_its_lease_is_interrupted_and_retried",
        _releases_the_lease_of_another,
    ),
    Twin(
        "L2",
        "renews_the_lease_of_another",
        _LOST + "test_actor_that_lost_its_lease_is_interrupted_and_retried",
        _renews_the_lease_of_another,
        slow=True,
    ),
    Twin(
        "L2",
        "reports_a_lost_lease_only_when_redis_answers",
        _LOST + "test_actor_is_interrupted_before_expiry_though_redis_does_not_answer",
        instead(Renewal, "notify_at", property(lambda self: float("inf"))),
        slow=True,
    ),
    Twin(
        "L2",
        "interrupts_the_hooks_too",
        _LOST + "test_lease_lost_in_the_hooks_after_the_actor_interrupts_nothing",
        _ends_no_interruptible_section,
    ),
    Twin(
        "L2",
        "interrupts_a_thread_that_takes_a_lock",
        "tests/unit/core/test_safe_points.py::test_interrupt_of_a_thread_waiting_for_a_lock_leaves_it_unlocked",
        instead(thread_interrupt, "at_safe_point", lambda thread_id, outside: True),
    ),
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
        instead(exclusive_lease, "holder_of", lambda token: Holder()),
    ),
    Twin(
        "L4",
        "retries_much_later",
        _LOST + "test_dead_holders_lease_is_taken_over_within_two_ttls",
        _retries_much_later,
    ),
    Twin(
        "L4",
        "treats_a_held_lease_as_an_error",
        _ACTORS + "test_message_is_skipped_while_another_holds_the_lease",
        instead(exclusive_lease, "Skip", StoreUnavailable),
    ),
    Twin(
        "L4",
        "tries_once_to_release",
        _GIVEN_BACK + "test_lease_is_released_if_redis_answers_the_third_try",
        instead(lease, "release_with_retries", lambda store, key, token: store.release(key, token)),
    ),
    Twin(
        "L4",
        "counts_a_released_lease_as_lost",
        _GIVEN_BACK + "test_lease_released_without_an_answer_stays_with_its_next_holder",
        instead(
            lease, "release_with_retries", lambda store, key, token: retry_redis(lambda: store.release(key, token))
        ),
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
]
