"""Tests of F3: a worker killed at any point of a run is taken over, with the same final state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import pytest

from tests.chaos.conftest import MakeTrial
from tests.chaos.families import BUILDS, FIVE, REFS, THREE, UPLOADS, Family
from tests.chaos.figures import Figures
from tests.chaos.trial import ServeTrial, Trial
from tests.chaos.verdicts import Undisturbed, drain, verdict

#: Point, number of the pass, and worker.
Point = tuple[str, int, Sequence[Family]]
#: Function that kills at these points and returns the errors.
KillAt = Callable[..., list[str]]

#: The message of the killed worker does the work, without another message.
_NO_RUN_IS_CUT_SHORT_S: Final = 30
_LEASED: Final = (REFS, BUILDS)


@pytest.fixture
def kill_at(make_trial: MakeTrial, undisturbed: Undisturbed, figures: Figures) -> KillAt:
    """Kill a worker at each point, with a round of work each. The next worker takes over and is killed next."""

    def kill(
        *points: Point, taken_over: bool = True, of: Sequence[Family] = FIVE, kind: type[Trial] = Trial
    ) -> list[str]:
        trial = make_trial(of, kind, lease_ttl_s=_NO_RUN_IS_CUT_SHORT_S)
        worker = trial.worker()
        wrong: list[str] = []
        for round, (point, nth, families) in enumerate(points, 1):
            trial.arm(point, nth, families)
            trial.fill(round, families)
            trial.tick([round])
            trial.await_held(worker)
            trial.kill(worker)
            killed_at = time.time()
            figures.faults[f"SIGKILL at: {point}"] += 1
            worker = trial.worker()
            drain(trial, worker, expected=undisturbed, ticking=False)
            for family in families:
                at = trial.recorder.taken_over_at(family.actor, killed_at)
                if at is not None and taken_over:
                    figures.taken_over("shortened settings", at - killed_at)
                if (at is not None) != taken_over:
                    wrong.append(f"{family.actor} killed at {point}: {'not' * taken_over} run again")
        return wrong + verdict(trial, undisturbed, figures)

    return kill


@pytest.mark.long
def test_runs_killed_before_their_first_batch_reach_the_same_state(kill_at: KillAt) -> None:
    assert kill_at(("acquire", 1, _LEASED), ("begin", 1, FIVE)) == []


def test_runs_killed_within_a_batch_reach_the_same_state(kill_at: KillAt) -> None:
    points = [("select", 2, FIVE), ("external", 1, [REFS]), ("update", 2, FIVE), ("cursor", 2, FIVE)]

    assert kill_at(*points, ("commit", 2, FIVE)) == []


@pytest.mark.parametrize(
    "points",
    [
        [("update", 2, THREE), ("commit", 2, THREE)],
        pytest.param([("taken", 1, [BUILDS]), ("begin", 1, THREE)], marks=pytest.mark.long),
    ],
    ids=["within a batch", "before the first batch"],
)
def test_process_without_redis_killed_anywhere_is_taken_over(kill_at: KillAt, points: list[Point]) -> None:
    assert kill_at(*points, of=THREE, kind=ServeTrial) == []


@pytest.mark.long
def test_completed_ticks_killed_before_their_end_do_not_repeat(kill_at: KillAt) -> None:
    points = [("release", 1, [BUILDS]), ("before_end", 1, [BUILDS])]

    assert kill_at(*points, taken_over=False, of=THREE, kind=ServeTrial) == []


@pytest.mark.long
def test_claimed_uploads_of_a_killed_run_are_taken_over(kill_at: KillAt) -> None:
    assert kill_at(("external", 1, [UPLOADS])) == []


@pytest.mark.long
def test_completed_runs_killed_before_the_ack_do_not_repeat(kill_at: KillAt) -> None:
    assert kill_at(("release", 1, _LEASED), ("before_ack", 1, FIVE), ("after_ack", 1, FIVE), taken_over=False) == []
