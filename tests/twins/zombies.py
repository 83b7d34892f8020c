"""Faults of sweeps that lose their lease, wake up late or die (promises L2, L3, L5, F1 to F4)."""

from __future__ import annotations

from typing import Any, Final

import pytest

from housekeeping import ExclusiveLease
from tests.internals.core import RedisUnavailable
from tests.internals.engine import run
from tests.internals.ledger import Run, runs
from tests.twins import Twin

_ZOMBIES: Final = "tests/integration/sweeps/engine/test_zombies.py::"
_LOST: Final = "tests/integration/sweeps/engine/test_lost_connections.py::"
_RUNS: Final = "tests/integration/sweeps/engine/test_runner.py::"


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


def _counts_the_unanswered_batch_twice(patch: pytest.MonkeyPatch) -> None:
    close_row = run._close_row

    def counting_again(request: Any, state: Any, run_id: int) -> None:
        close_row(request, state, run_id)
        state.counts["deleted_rows"] += 10
        Run.update(counts=state.counts).where(Run.id == run_id).execute()

    patch.setattr(run, "_close_row", counting_again)


TWINS: Final[list[Twin]] = [
    Twin(
        "L3",
        "commits_without_its_epoch",
        _ZOMBIES + "test_zombie_that_wakes_within_a_batch_commits_nothing",
        _commits_without_its_epoch,
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
        "F4",
        "counts_the_unanswered_batch_twice",
        _LOST + "test_batch_with_an_unanswered_commit_is_counted_once",
        _counts_the_unanswered_batch_twice,
    ),
]
