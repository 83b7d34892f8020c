"""Tests of archive, restore, partitions and purge under random faults, and of a kill between detach and drop."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import pytest

from tests.chaos.conftest import MakeTrial
from tests.chaos.figures import Figures
from tests.chaos.retention.families import EVENTS, MODULE, ORDERS, OVER, SESSIONS
from tests.chaos.retention.operators import Purger, Restorer
from tests.chaos.storm import Storm, Worker
from tests.chaos.trial import Trial
from tests.chaos.verdicts import Undisturbed, drain, verdict

EXPECTED: Final[Undisturbed] = {family.actor: family.expected() for family in (SESSIONS, EVENTS, ORDERS)}
DETACHED: Final = (
    "SELECT relname FROM pg_class WHERE relkind = 'r' AND NOT relispartition AND starts_with(relname, 'events_') "
    "AND relnamespace = current_schema()::regnamespace"
)

#: Function that makes a trial of these families.
MakeShop = Callable[..., Trial]


@pytest.fixture
def make_shop(make_trial: MakeTrial) -> MakeShop:
    return lambda *families: make_trial(families, settings={"SWEEPS": MODULE})


def test_random_faults_leave_each_row_in_one_of_both_tables(
    make_shop: MakeShop, figures: Figures, seed: int, storm_s: float
) -> None:
    trial, chance = make_shop(SESSIONS), random.Random(seed)
    restorer = Restorer(trial, chance)
    storm = Storm(trial, chance, figures, [Worker(trial), Worker(trial), restorer])

    def work(round: int) -> None:
        trial.add_round(round)
        restorer.proceed()

    storm.rage(storm_s, work)
    restorer.resume()
    drain(trial, *storm.processes, expected=EXPECTED)  # the last restore may have left no archived rows
    restorer.restore()
    drain(trial, *storm.processes, expected=EXPECTED)

    assert verdict(trial, EXPECTED, figures) == [], f"run it again with --chaos-seed {seed}"
    assert restorer.restored > 0


def test_random_faults_drop_each_old_partition_once(
    make_shop: MakeShop, figures: Figures, seed: int, storm_s: float
) -> None:
    trial = make_shop(EVENTS)
    storm = Storm(trial, random.Random(seed), figures, [Worker(trial), Worker(trial)])

    storm.rage(storm_s, trial.add_round)
    drain(trial, *storm.processes, expected=EXPECTED)

    assert verdict(trial, EXPECTED, figures) == [], f"run it again with --chaos-seed {seed}"


def test_worker_killed_between_detach_and_drop_is_taken_over(make_shop: MakeShop, figures: Figures) -> None:
    trial = make_shop(EVENTS)
    worker = trial.worker()
    trial.hold_first_round("detach", 2, worker)

    trial.kill(worker)
    figures.faults["SIGKILL at: detach"] += 1
    left = trial.place.rows(DETACHED)
    drain(trial, trial.worker(), expected=EXPECTED, ticking=False)

    assert left == [("events_1_over1",)]
    assert verdict(trial, EXPECTED, figures) == []
    assert trial.place.rows("SELECT count(*) FROM audit WHERE tbl = 'events'") == [(OVER,)]


def test_random_faults_purge_as_many_rows_as_allowed(
    make_shop: MakeShop, figures: Figures, seed: int, storm_s: float
) -> None:
    trial = make_shop(ORDERS)
    purger = Purger(trial)
    storm = Storm(trial, random.Random(seed), figures, [purger])

    purger.begin_and_be_killed()
    storm.rage(storm_s, lambda round: purger.proceed())
    purger.finish()

    assert verdict(trial, EXPECTED, figures) == [], f"run it again with --chaos-seed {seed}"
    assert purger.resumed > 0
