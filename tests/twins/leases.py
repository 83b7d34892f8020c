"""What could be wrong with leases, epochs, the fence, and runs that lose them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import pytest

from housekeeping.foundation import epochs, interruption, lease_store, leases
from housekeeping.foundation.db import database
from housekeeping.foundation.errors import LeaseLost, RedisUnavailable
from housekeeping.foundation.holders import Holder
from housekeeping.foundation.leases import ExclusiveLease
from housekeeping.foundation.renewal import Kept
from housekeeping.foundation.steering import PutBack, StoreUnavailable
from housekeeping.middleware import exclusive_lease
from housekeeping.sweeps import held_leases, ledger, run, run_lease, schema
from housekeeping.sweeps.own_tables import Run
from housekeeping.workers.old_runs import worker as own_worker
from tests.twins import Twin

_FENCES: Final = "tests/integration/foundation/test_fences.py::"
_EPOCHS: Final = "tests/integration/foundation/test_epochs.py::"
_LEASES: Final = "tests/integration/foundation/test_leases.py::"
_ACTORS: Final = "tests/integration/middleware/test_exclusive_lease.py::"
_LOST: Final = "tests/integration/middleware/test_lost_leases.py::"
_ZOMBIES: Final = "tests/integration/sweeps/test_zombies.py::"
_RUNS: Final = "tests/integration/sweeps/test_run.py::"
_BY_HAND: Final = "tests/integration/sweeps/test_held_leases.py::"

Breaks = Callable[[pytest.MonkeyPatch], None]


def _sets(owner: Any, name: str, value: Any) -> Breaks:
    return lambda patch: patch.setattr(owner, name, value)


def _grants_what_is_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease_store, "_OBTAIN", 'redis.call("set", KEYS[1], ARGV[1], "px", ARGV[2]) return ARGV[1]')


def _releases_what_another_holds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease_store, "_RELEASE", 'return redis.call("del", KEYS[1])')


def _renews_what_another_holds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease_store, "_RENEW", 'redis.call("pexpire", KEYS[1], ARGV[2]) return 1')


def _leaves_no_section(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(interruption, "_sections", {})
    patch.setattr(interruption, "_leave", lambda thread_id: None)


def _interrupts_nobody(patch: pytest.MonkeyPatch) -> None:
    keep = ExclusiveLease.keep
    patch.setattr(ExclusiveLease, "keep", lambda self, *, interrupting=False: keep(self))


def _begins_without_its_lease(patch: pytest.MonkeyPatch) -> None:
    holding: Any = lambda self, function, *args, **kwargs: function(*args, **kwargs)  # noqa: E731
    patch.setattr(exclusive_lease.ExclusiveLeases, "_holding", holding)


def _commits_without_its_epoch(patch: pytest.MonkeyPatch) -> None:
    write = ledger._write
    patch.setattr(ledger, "_write", lambda run_id, lease, **columns: write(run_id, None, **columns))


def _looks_without_locking(patch: pytest.MonkeyPatch) -> None:
    def check(key: str, epoch: int, connection: Any = None) -> None:
        query = f'SELECT 1 FROM "{epochs.Lease._meta.schema}".leases WHERE key = %s AND epoch = %s'
        if database.execute_sql(query, (key, epoch)).fetchone() is None:
            raise LeaseLost("passed on")

    patch.setattr(leases, "check_epoch", check)


def _numbers_all_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leases, "take_epoch", lambda key, token: 1)


def _begins_again_with_each_row(patch: pytest.MonkeyPatch) -> None:
    def next_epoch(key: str, token: str) -> int:
        query = f"""
            INSERT INTO "{epochs.Lease._meta.schema}".leases (key, epoch, holder, used_at) VALUES (%s, 1, %s, now())
            ON CONFLICT (key) DO UPDATE SET epoch = leases.epoch + 1, holder = EXCLUDED.holder RETURNING epoch
        """
        epoch: int = database.execute_sql(query, (key, token)).fetchone()[0]
        return epoch

    patch.setattr(epochs, "next_epoch", next_epoch)


def _draws_before_it_may_begin(patch: pytest.MonkeyPatch) -> None:
    def next_epoch(key: str, token: str) -> int:
        query = f"""
            INSERT INTO "{epochs.Lease._meta.schema}".leases (key, holder, used_at) VALUES (%s, %s, now())
            ON CONFLICT (key) DO UPDATE SET epoch = EXCLUDED.epoch, holder = EXCLUDED.holder RETURNING epoch
        """
        epoch: int = database.execute_sql(query, (key, token)).fetchone()[0]
        return epoch

    patch.setattr(epochs, "next_epoch", next_epoch)


def _takes_a_forgotten_row_for_its_own(patch: pytest.MonkeyPatch) -> None:
    fetched = epochs._fetched
    patch.setattr(epochs, "_fetched", lambda *given: fetched(*given) or (False,))


def _keeps_a_refused_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExclusiveLease, "_give_back", lambda self: None)


def _comes_back_much_later(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exclusive_lease, "PutBack", lambda reason, after: PutBack(reason, 3 * after + timedelta(seconds=1)))


def _takes_silence_for_free(patch: pytest.MonkeyPatch) -> None:
    try_obtain = ExclusiveLease.try_obtain

    def obtain(self: ExclusiveLease) -> str | None:
        try:
            return try_obtain(self)
        except RedisUnavailable:
            return "unprotected"

    patch.setattr(ExclusiveLease, "try_obtain", obtain)
    patch.setattr(ExclusiveLease, "cancel", lambda self: True)


def _passes_over_errors(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def passing() -> Iterator[None]:
        with contextlib.suppress(Exception):
            yield

    patch.setattr(exclusive_lease, "failing_the_message", passing)


def _reports_the_end_as_a_failure(patch: pytest.MonkeyPatch) -> None:
    def broken_off(self: Any, outcome: Any, reason: str, error: BaseException) -> Any:
        ledger.fail(self.run_id, outcome, reason, str(error), {})
        return outcome, reason, error

    patch.setattr(run._Performance, "_broken_off", broken_off)


def _counts_what_it_had_in_hand_again(patch: pytest.MonkeyPatch) -> None:
    broken_off = run._Performance._broken_off

    def again(self: Any, *given: Any) -> Any:
        end = broken_off(self, *given)
        self.counts["deleted_rows"] += 10
        Run.update(counts=self.counts).where(Run.id == self.run_id).execute()
        return end

    patch.setattr(run._Performance, "_broken_off", again)


def _leaves_dead_attempts_open(patch: pytest.MonkeyPatch) -> None:
    begin = ledger.begin
    patch.setattr(ledger, "begin", lambda worker, **given: begin(worker, **{**given, "message_id": None}))


TWINS: Final[list[Twin]] = [
    Twin("L1", "grants_what_is_held", _ACTORS + "test_of_many_messages_at_once_one_runs", _grants_what_is_held),
    Twin(
        "L1",
        "releases_what_another_holds",
        _LOST + "test_an_actor_whose_lease_was_lost_is_interrupted_and_retried",
        _releases_what_another_holds,
    ),
    Twin(
        "L2",
        "renews_what_another_holds",
        _LOST + "test_an_actor_whose_lease_was_lost_is_interrupted_and_retried",
        _renews_what_another_holds,
        slow=True,
    ),
    Twin(
        "L2",
        "tells_only_when_the_server_answers",
        _LOST + "test_an_actor_is_interrupted_in_time_although_redis_neither_renews_nor_answers",
        _sets(Kept, "tell_at", property(lambda self: float("inf"))),
        slow=True,
    ),
    Twin(
        "L2",
        "interrupts_the_hooks_too",
        _LOST + "test_a_lease_that_is_lost_in_the_hooks_after_the_actor_interrupts_nothing",
        _leaves_no_section,
    ),
    Twin(
        "L2",
        "begins_without_its_lease",
        _LOST + "test_an_actor_whose_lease_was_lost_before_it_began_does_not_begin",
        _begins_without_its_lease,
    ),
    Twin(
        "L2",
        "lets_a_batch_hang",
        _ZOMBIES + "test_a_sweep_that_hangs_in_a_batch_is_interrupted_when_its_lease_is_lost",
        _interrupts_nobody,
        slow=True,
    ),
    Twin(
        "L3",
        "commits_without_its_epoch",
        _ZOMBIES + "test_a_zombie_that_wakes_in_the_middle_of_a_batch_commits_nothing_of_it",
        _commits_without_its_epoch,
    ),
    Twin(
        "L3",
        "lets_everyone_through_the_fence",
        _FENCES + "test_a_holder_that_slept_commits_nothing_once_another_has_begun",
        _sets(leases, "check_epoch", lambda key, epoch, connection=None: None),
    ),
    Twin(
        "L3",
        "lets_actors_through_the_fence",
        _LOST + "test_an_actor_that_slept_commits_nothing_once_another_has_begun",
        _sets(leases, "check_epoch", lambda key, epoch, connection=None: None),
    ),
    Twin(
        "L3",
        "looks_without_locking",
        _FENCES + "test_the_next_epoch_waits_for_a_fenced_transaction_to_end",
        _looks_without_locking,
    ),
    Twin(
        "L3",
        "numbers_all_alike",
        _LOST + "test_each_run_of_an_actor_has_a_higher_epoch_and_may_commit",
        _numbers_all_alike,
    ),
    Twin(
        "L3",
        "takes_a_late_epoch_for_good",
        _FENCES + "test_a_lease_that_ended_while_its_epoch_was_taken_is_none",
        _sets(leases, "surely_until", lambda since, ttl_s: float("inf")),
    ),
    Twin(
        "L3",
        "keeps_a_refused_lease",
        _FENCES + "test_a_lease_whose_epoch_is_refused_is_given_back",
        _keeps_a_refused_lease,
    ),
    Twin(
        "L3",
        "releases_by_hand_without_raising_the_epoch",
        _BY_HAND + "test_the_holder_is_harmless_before_redis_lets_go",
        _sets(held_leases, "_raise_epoch", lambda key, seen: None),
    ),
    Twin(
        "L3",
        "begins_again_with_each_row",
        _EPOCHS + "test_an_epoch_is_higher_than_those_before_it_though_its_row_was_forgotten",
        _begins_again_with_each_row,
    ),
    Twin(
        "L3",
        "draws_before_it_may_begin",
        _EPOCHS + "test_an_epoch_is_drawn_only_when_nobody_else_can_begin",
        _draws_before_it_may_begin,
        slow=True,
    ),
    Twin(
        "L3",
        "trusts_the_sequence_alone",
        _EPOCHS + "test_an_epoch_is_higher_than_one_that_was_counted_on_without_the_sequence",
        _draws_before_it_may_begin,
    ),
    Twin(
        "L3",
        "begins_at_one_after_an_upgrade",
        _EPOCHS + "test_epochs_of_an_upgraded_database_go_on_above_all_there_were",
        _sets(schema, "MIGRATIONS", (*schema.MIGRATIONS[:2], schema.MIGRATIONS[2].split("SELECT setval")[0])),
    ),
    Twin(
        "L3",
        "takes_a_forgotten_row_for_its_own",
        _EPOCHS + "test_a_holder_whose_row_was_forgotten_commits_nothing",
        _takes_a_forgotten_row_for_its_own,
    ),
    Twin(
        "L3",
        "forgets_too_early",
        "tests/integration/old_runs/test_worker.py"
        "::test_leases_that_nobody_used_for_30_days_go_and_those_of_open_runs_stay",
        _sets(own_worker, "LEASES_KEPT_FOR", timedelta(days=29)),
    ),
    Twin(
        "L4",
        "drops_the_message_of_a_dead_attempt",
        _LOST + "test_a_message_that_meets_its_own_dead_attempts_lease_comes_back",
        _sets(exclusive_lease, "holder_of", lambda token: Holder()),
    ),
    Twin(
        "L4",
        "comes_back_much_later",
        _LOST + "test_a_dead_holders_lease_is_taken_over_within_two_ttls",
        _comes_back_much_later,
    ),
    Twin(
        "L4",
        "takes_held_elsewhere_for_an_error",
        _ACTORS + "test_a_message_is_skipped_while_another_holds_the_lease",
        _sets(exclusive_lease, "Skip", StoreUnavailable),
    ),
    Twin(
        "L5",
        "runs_a_sweep_although_redis_is_silent",
        _RUNS + "test_nothing_runs_unprotected_while_redis_is_away",
        _takes_silence_for_free,
    ),
    Twin(
        "L5",
        "runs_an_actor_although_redis_is_silent",
        _ACTORS + "test_without_redis_the_message_fails_and_is_retried_and_does_not_run",
        _passes_over_errors,
    ),
    Twin(
        "L6",
        "asks_for_no_transaction",
        _LEASES + "test_a_lease_is_refused_inside_an_open_transaction",
        _sets(leases, "_in_transaction", lambda: False),
    ),
    Twin(
        "F1",
        "lets_a_zombie_commit",
        _ZOMBIES + "test_a_zombie_that_wakes_in_the_middle_of_a_batch_commits_nothing_of_it",
        _commits_without_its_epoch,
    ),
    Twin(
        "F2",
        "doubles_effects_when_redis_forgets",
        _ZOMBIES + "test_when_redis_loses_its_keys_attempts_double_and_effects_do_not",
        _commits_without_its_epoch,
    ),
    Twin(
        "F3",
        "lets_a_dead_attempt_keep_its_lease",
        _ZOMBIES + "test_the_lease_of_an_attempt_that_died_before_its_row_is_taken_over_by_its_own_message",
        _sets(run_lease, "_is_of", lambda message_id, owner: False),
    ),
    Twin(
        "F4",
        "counts_what_it_had_in_hand_again",
        _ZOMBIES + "test_a_batch_whose_commit_was_not_answered_is_counted_once",
        _counts_what_it_had_in_hand_again,
    ),
    Twin(
        "F4",
        "leaves_dead_attempts_open",
        _ZOMBIES + "test_a_run_whose_first_commit_was_not_answered_leaves_a_row_that_its_retry_closes",
        _leaves_dead_attempts_open,
    ),
    Twin(
        "F4",
        "calls_a_run_failed_that_was_done",
        _ZOMBIES + "test_a_run_that_ended_before_it_lost_its_lease_is_done",
        _reports_the_end_as_a_failure,
    ),
]
