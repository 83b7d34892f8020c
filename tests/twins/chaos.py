"""Faults for the chaos suite: takeover, paused workers, lost answers, lost servers, ticks, mixed releases."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.internals.database import database
from tests.internals.ledger import Run, runs
from tests.twins import Twin
from tests.twins.scenarios import deletes_dependents_of_fresh_parents

_KILLS: Final = "tests/chaos/test_kill_points.py::"
_ZOMBIES: Final = "tests/chaos/test_zombies.py::"


def _commits_without_the_lease(patch: pytest.MonkeyPatch) -> None:
    def write(run_id: int, lease: tuple[str, int] | None, **columns: Any) -> None:
        Run.update(**columns).where(Run.id == run_id).execute()

    patch.setattr(runs, "_write", write)


def _counts_a_begun_run_as_done(patch: pytest.MonkeyPatch) -> None:
    def begun(message_id: str) -> Any:
        return Run.select(Run.id).where((Run.message_id == message_id) & Run.outcome.is_null(False))

    patch.setattr(runs, "_completed", begun)


def _discards_counts_of_a_failed_run(patch: pytest.MonkeyPatch) -> None:
    original = runs.fail

    def fail(run_id: int, *arguments: Any) -> Any:
        closed = original(run_id, *arguments)
        with database.atomic():
            Run.update(counts={}).where(Run.id == run_id).execute()
        return closed

    patch.setattr(runs, "fail", fail)


TWINS: Final = [
    Twin(
        "F1",
        "chaos_commits_after_a_takeover",
        f"{_ZOMBIES}test_worker_paused_past_its_ttl_cannot_commit_after_a_takeover",
        _commits_without_the_lease,
        in_processes=True,
    ),
    Twin(
        "F3",
        "chaos_counts_a_begun_run_as_done",
        f"{_KILLS}test_runs_killed_within_a_batch_reach_the_same_state",
        _counts_a_begun_run_as_done,
        in_processes=True,
    ),
    Twin(
        "C1",
        "chaos_deletes_dependents_of_fresh_parents",
        "tests/chaos/test_cascade.py::test_lost_answers_and_reopened_accounts_are_noticed_at_the_next_commit",
        deletes_dependents_of_fresh_parents,
        in_processes=True,
    ),
    Twin(
        "F4",
        "chaos_miscounts_by_chance",
        "tests/chaos/test_random_faults.py::test_random_faults_lose_and_repeat_nothing",
        _discards_counts_of_a_failed_run,
        in_processes=True,
    ),
]
