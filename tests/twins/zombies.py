"""Faults of sweeps that lose their lease, wake up late or die (promises L2, L3, L5, F1 to F4)."""

from __future__ import annotations

from typing import Any, Final

import pytest

from housekeeping.core.errors import RedisUnavailable
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.sweeps.engine import run_end, run_lease
from housekeeping.sweeps.ledger import lease_admin, run_start, runs
from housekeeping.sweeps.ledger.models import Run
from tests.twins import Twin
from tests.twins.planting import instead

_ZOMBIES: Final = "tests/integration/sweeps/engine/test_zombies.py::"
_LOST: Final = "tests/integration/sweeps/engine/test_lost_connections.py::"
_RUNS: Final = "tests/integration/sweeps/engine/test_runner.py::"
_BY_HAND: Final = "tests/integration/sweeps/ledger/test_lease_admin.py::"


def _interrupts_no_thread(patch: pytest.MonkeyPatch) -> None:
    start_renewal = ExclusiveLease.start_renewal
    patch.setattr(ExclusiveLease, "start_renewal", lambda self, *, interrupting=False: start_renewal(self))


def _commits_without_its_epoch(patch: pytest.MonkeyPatch) -> None:
    write = runs._write
    patch.setattr(runs, "_write", lambda run_id, lease, **columns: write(run_id, None, **columns))


def _treats_no_answer_as_free(patch: pytest.MonkeyPatch) -> None:
    try_obtain = ExclusiveLease.try_obtain

    def obtain(self: ExclusiveLease) -> str | None:
        try:
            return try_obtain(self)
        except RedisUnavailable:
            return "unprotected"

    patch.setattr(ExclusiveLease, "try_obtain", obtain)
    patch.setattr(ExclusiveLease, "cancel", lambda self: True)


def _reports_the_end_as_a_failure(patch: pytest.MonkeyPatch) -> None:
    def close_row(request: Any, progress: Any, end: Any) -> Any:
        runs.fail(progress.run_id, end.outcome, end.reason, str(end.error), {})
        return end

    patch.setattr(run_end, "_close_row", close_row)


def _counts_the_unanswered_batch_twice(patch: pytest.MonkeyPatch) -> None:
    close_row = run_end._close_row

    def counting_again(request: Any, progress: Any, end: Any) -> Any:
        end = close_row(request, progress, end)
        progress.counts["deleted_rows"] += 10
        Run.update(counts=progress.counts).where(Run.id == progress.run_id).execute()
        return end

    patch.setattr(run_end, "_close_row", counting_again)


def _leaves_dead_attempts_open(patch: pytest.MonkeyPatch) -> None:
    begin = run_start.begin
    patch.setattr(run_start, "begin", lambda worker, **given: begin(worker, **{**given, "message_id": None}))


TWINS: Final[list[Twin]] = [
    Twin(
        "L2",
        "never_interrupts_a_hanging_batch",
        _ZOMBIES + "test_hanging_batch_is_interrupted_when_the_lease_is_lost",
        _interrupts_no_thread,
        slow=True,
    ),
    Twin(
        "L3",
        "commits_without_its_epoch",
        _ZOMBIES + "test_zombie_that_wakes_within_a_batch_commits_nothing",
        _commits_without_its_epoch,
    ),
    Twin(
        "L3",
        "releases_manually_without_a_new_epoch",
        _BY_HAND + "test_holder_is_fenced_off_before_redis_releases_the_lease",
        instead(lease_admin, "_raise_epoch", lambda key, seen: None),
    ),
    Twin(
        "L5",
        "runs_a_sweep_without_redis",
        _RUNS + "test_run_with_a_lease_fails_while_redis_is_away",
        _treats_no_answer_as_free,
    ),
    Twin(
        "F1",
        "commits_after_a_takeover",
        _ZOMBIES + "test_zombie_that_wakes_within_a_batch_commits_nothing",
        _commits_without_its_epoch,
    ),
    Twin(
        "F2",
        "repeats_effects_when_redis_is_emptied",
        _ZOMBIES + "test_lost_redis_keys_repeat_attempts_but_no_effect",
        _commits_without_its_epoch,
    ),
    Twin(
        "F3",
        "never_takes_over_a_dead_attempts_lease",
        _ZOMBIES + "test_lease_of_an_attempt_without_a_row_goes_to_its_own_message",
        instead(run_lease, "_is_of", lambda message_id, owner: False),
    ),
    Twin(
        "F4",
        "counts_the_unanswered_batch_twice",
        _LOST + "test_batch_with_an_unanswered_commit_is_counted_once",
        _counts_the_unanswered_batch_twice,
    ),
    Twin(
        "F4",
        "leaves_dead_attempts_open",
        _LOST + "test_retry_closes_the_row_of_an_unanswered_first_commit",
        _leaves_dead_attempts_open,
    ),
    Twin(
        "F4",
        "records_a_done_run_as_failed",
        _ZOMBIES + "test_run_that_ended_before_it_lost_its_lease_is_done",
        _reports_the_end_as_a_failure,
    ),
]
