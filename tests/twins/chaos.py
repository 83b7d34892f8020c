"""Faults for the chaos suite: takeover, paused workers, lost answers, lost servers, ticks, mixed releases."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import pytest

from tests.internals.core import MAIN
from tests.internals.database import database
from tests.internals.leases import HeldLeaseRow as HeldLease
from tests.internals.leases import PostgresLeaseStore
from tests.internals.ledger import NOW, Run, runs, ticks
from tests.twins import Twin
from tests.twins.scenarios import deletes_dependents_of_fresh_parents

_KILLS: Final = "tests/chaos/test_kill_points.py::"
_ALIVE: Final = "tests/chaos/test_two_serving.py::test_ticks_and_leases_stay_with_a_process_that_is_alive"
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


def _takes_ticks_of_the_living(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ticks, "NOW", NOW + timedelta(hours=1))


def _runs_a_tick_again_as_another_message(patch: pytest.MonkeyPatch) -> None:
    original = ticks.take

    def take(*given: Any) -> Any:
        return [each._replace(message_id=uuid4().hex) for each in original(*given)]

    patch.setattr(ticks, "take", take)


def _grants_a_held_lease_in_the_database(patch: pytest.MonkeyPatch) -> None:
    def obtain(self: object, key: str, token: str, ttl: timedelta) -> str:
        given = {HeldLease.holder: token, HeldLease.expires_at: NOW + ttl}
        with database.using(MAIN):
            taking = HeldLease.insert({HeldLease.key: key, **given})
            taking.on_conflict(conflict_target=[HeldLease.key], update=given).execute()
        return token

    patch.setattr(PostgresLeaseStore, "obtain", obtain)


TWINS: Final = [
    Twin("S1", "chaos_takes_ticks_of_the_living", _ALIVE, _takes_ticks_of_the_living, in_processes=True),
    Twin(
        "L1",
        "chaos_grants_a_held_lease_in_the_database",
        _ALIVE,
        _grants_a_held_lease_in_the_database,
        in_processes=True,
    ),
    Twin(
        "S5",
        "chaos_runs_a_tick_again_as_another_message",
        f"{_KILLS}test_completed_ticks_killed_before_their_end_do_not_repeat",
        _runs_a_tick_again_as_another_message,
        in_processes=True,
    ),
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
