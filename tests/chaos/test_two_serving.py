"""Tests of two processes without Redis: each leaves the other its ticks and leases (S1, L1)."""

from __future__ import annotations

import pytest

from tests.acceptance.processes import eventually
from tests.chaos.conftest import MakeTrial
from tests.chaos.families import BUILDS, THREE
from tests.chaos.figures import Figures
from tests.chaos.test_zombies import ended
from tests.chaos.trial import ServeTrial
from tests.chaos.verdicts import Undisturbed, drain, verdict

HOUR_S = 3600


@pytest.mark.parametrize("ahead_s", [HOUR_S, pytest.param(-HOUR_S, marks=pytest.mark.long)])
def test_process_with_a_wrong_clock_repeats_and_loses_nothing(
    ahead_s: int, make_trial: MakeTrial, undisturbed: Undisturbed, figures: Figures
) -> None:
    trial = make_trial(THREE, ServeTrial)
    assert isinstance(trial, ServeTrial)
    wrong = trial.worker(ahead_s=ahead_s)
    figures.faults["clock an hour wrong"] += 1
    trial.add_round(1)
    eventually(lambda: wrong.said("Run ended"), wrong)

    right = trial.worker()
    drain(trial, wrong, right, expected=undisturbed)

    assert verdict(trial, undisturbed, figures) == []


def test_ticks_and_leases_stay_with_a_process_that_is_alive(
    make_trial: MakeTrial, undisturbed: Undisturbed, figures: Figures
) -> None:
    trial = make_trial(THREE, ServeTrial)
    processes = trial.worker(), trial.worker()
    eventually(lambda: all("serving" in each.text() for each in processes), *processes)
    trial.hold_first_round("update", 2, *processes)

    trial.tick()
    eventually(lambda: any(BUILDS.actor in ended(each) for each in processes), *processes)
    trial.go()
    drain(trial, *processes, expected=undisturbed)

    assert verdict(trial, undisturbed, figures) == []
