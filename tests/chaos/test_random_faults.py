"""Test of random faults against two workers: nothing is lost or repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.chaos.conftest import MakeTrial
from tests.chaos.families import FOUR, THREE, Family
from tests.chaos.figures import Figures
from tests.chaos.storm import Storm, Worker
from tests.chaos.trial import ServeTrial, Trial
from tests.chaos.verdicts import Undisturbed, drain, verdict


@pytest.mark.parametrize(
    ("kind", "families", "given"),
    [(Trial, FOUR, {}), (ServeTrial, THREE, {"schedule": "* * * * *"})],
    ids=["Redis", "PostgreSQL only"],
)
def test_random_faults_lose_and_repeat_nothing(
    kind: type[Trial],
    families: Sequence[Family],
    given: dict[str, str],
    make_trial: MakeTrial,
    undisturbed: Undisturbed,
    figures: Figures,
    seed: int,
    storm_s: float,
) -> None:
    trial = make_trial(families, kind, **given)
    storm = Storm(trial, random.Random(seed), figures, [Worker(trial), Worker(trial)])

    storm.rage(storm_s, trial.add_round)
    drain(trial, *storm.processes, expected=undisturbed)

    assert verdict(trial, undisturbed, figures) == [], f"run it again with --chaos-seed {seed}"
