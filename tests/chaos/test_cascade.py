"""Tests of a cascade of three levels: kills, lost answers, takeovers, an empty Redis, and random faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import pytest

from tests.acceptance.processes import eventually
from tests.chaos.conftest import MakeTrial
from tests.chaos.figures import Figures
from tests.chaos.retention.families import ACCOUNTS, ACCOUNTS_MODULE
from tests.chaos.storm import Storm, Worker
from tests.chaos.test_zombies import broken_off, empty_redis_until_taken_over, ended, pause_until_taken_over
from tests.chaos.trial import PATIENCE_S, Trial
from tests.chaos.verdicts import Undisturbed, drain, verdict

EXPECTED: Final[Undisturbed] = {ACCOUNTS.actor: ACCOUNTS.expected()}
#: A run has some 30 commits: items, purchases, comments and accounts of three groups.
POINTS: Final = [("update", 5), ("commit", 15)]
ALL_POINTS: Final = [
    *(("commit", nth) for nth in range(1, 25, 2)),
    *((point, nth) for point in ("select", "update", "cursor") for nth in (2, 13)),
]
#: The message of the killed worker does the work, without another message.
_NO_RUN_IS_CUT_SHORT_S: Final = 30

#: Function that makes a trial with the accounts.
MakeShop = Callable[..., Trial]


@pytest.fixture
def make_shop(make_trial: MakeTrial) -> MakeShop:
    return lambda **more: make_trial([ACCOUNTS], settings={"SWEEPS": ACCOUNTS_MODULE}, **more)


@pytest.mark.parametrize("points", [POINTS, pytest.param(ALL_POINTS, marks=pytest.mark.long)], ids=["some", "most"])
def test_killed_cascade_is_continued_by_another_run(
    points: list[tuple[str, int]], make_shop: MakeShop, figures: Figures
) -> None:
    trial = make_shop(lease_ttl_s=_NO_RUN_IS_CUT_SHORT_S)
    worker = trial.worker()
    for round, (point, nth) in enumerate(points, 1):
        trial.arm(point, nth)
        trial.add_round(round)
        trial.await_held(worker)
        trial.kill(worker)
        figures.faults[f"SIGKILL at: {point}"] += 1
        ACCOUNTS.reopen(trial.place, round)
        worker = trial.worker()
        drain(trial, worker, expected=EXPECTED, ticking=False)

    assert verdict(trial, EXPECTED, figures) == []


def test_lost_answers_and_reopened_accounts_are_noticed_at_the_next_commit(
    make_shop: MakeShop, figures: Figures
) -> None:
    """The oldest accounts, which are reopened, are those of the first group."""
    trial = make_shop(lease_ttl_s=_NO_RUN_IS_CUT_SHORT_S)
    worker = trial.worker()
    for round, nth in enumerate((1, 3, 8), 1):
        trial.arm("commit", nth)
        trial.add_round(round)
        trial.await_held(worker)
        ACCOUNTS.reopen(trial.place, round)
        trial.postgres.cut_commits(1)
        trial.go()
        drain(trial, worker, expected=EXPECTED)
    figures.faults["connection cut after COMMIT was forwarded"] += trial.postgres.commits_cut

    assert verdict(trial, EXPECTED, figures) == []
    assert trial.postgres.commits_cut == 3


@pytest.mark.long
def test_paused_cascade_cannot_commit_after_a_takeover(make_shop: MakeShop, figures: Figures) -> None:
    trial = make_shop()
    sleeper = trial.worker()
    trial.hold_first_round("update", 5, sleeper)

    other = pause_until_taken_over(trial, sleeper, figures)
    eventually(lambda: ended(sleeper), sleeper, patience_s=PATIENCE_S)
    drain(trial, sleeper, other, expected=EXPECTED)

    assert verdict(trial, EXPECTED, figures) == []
    assert broken_off(sleeper) == {ACCOUNTS.actor}


@pytest.mark.long
def test_cascade_whose_lease_redis_lost_changes_each_row_once(make_shop: MakeShop, figures: Figures) -> None:
    trial = make_shop()
    one = trial.worker()
    trial.hold_first_round("select", 5, one)

    other = empty_redis_until_taken_over(trial, one, figures)
    drain(trial, one, other, expected=EXPECTED)

    assert verdict(trial, EXPECTED, figures) == []


def test_random_faults_leave_no_orphan_and_spare_reopened_accounts(
    make_shop: MakeShop, figures: Figures, seed: int, storm_s: float
) -> None:
    trial, chance = make_shop(), random.Random(seed)
    storm = Storm(trial, chance, figures, [Worker(trial), Worker(trial)])

    def work(round: int) -> None:
        trial.add_round(round)
        ACCOUNTS.reopen(trial.place, chance.randint(1, round))

    storm.rage(storm_s, work)
    drain(trial, *storm.processes, expected=EXPECTED)

    assert verdict(trial, EXPECTED, figures) == [], f"run it again with --chaos-seed {seed}"
