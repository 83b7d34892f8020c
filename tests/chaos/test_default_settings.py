"""Tests with default settings: takeover of a killed worker within 90 s, and two schedulers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Final, Literal

import pytest

from tests.acceptance.processes import eventually
from tests.chaos.conftest import MakeTrial
from tests.chaos.families import FIVE, STATUSES
from tests.chaos.figures import Figures
from tests.chaos.trial import Trial
from tests.chaos.verdicts import Undisturbed, drain, verdict
from tests.internals.embedded import Servers

pytestmark = pytest.mark.long

ScopeName = Literal["function", "module"]

TAKEN_OVER_WITHIN_S: Final = 90
_MINUTE_S: Final = 60
_TWO_MINUTES_S: Final = 120
#: Not at the tick itself: a scheduler that dies between claiming and sending a tick loses it.
_MAY_DIE_AT_S: Final = range(4, 56)
_ROWS_OF_TICKS: Final = (
    "SELECT tick, count(*) FROM {own}.runs WHERE tick IS NOT NULL AND outcome <> 'missed' GROUP BY 1"
)


class Restarted:
    """Two schedulers and a worker. Each scheduler in turn is killed and replaced."""

    def __init__(self, trial: Trial, figures: Figures) -> None:
        self.trial = trial
        self._first_tick = (time.time() // _MINUTE_S + 1) * _MINUTE_S
        self._figures = figures
        self._worker = trial.worker()
        self._restarted_at: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="restarts of schedulers")
        self._thread.start()

    def _go_on(self) -> None:
        running = [self.trial.scheduler(), self.trial.scheduler()]
        started_at = time.time()
        while not self._over.wait(4):
            # One of them is always running.
            if running[1].text() and int(time.time()) % _MINUTE_S in _MAY_DIE_AT_S:
                self._restarted_at.append(started_at)
                running.pop(0).kill()
                started_at = time.time()
                running.append(self.trial.scheduler())
                self._figures.faults["scheduler killed and restarted"] += 1

    def rows_of_ticks(self) -> dict[float, int]:
        """Return the number of ledger rows per tick."""
        query = _ROWS_OF_TICKS.format(own=self.trial.own_schema)
        return {tick.timestamp(): rows for tick, rows in self.trial.place.rows(query)}

    def ticks_met_again(self) -> set[float]:
        """Return ticks in whose minute a scheduler also started, which might send them again."""
        minutes = {moment // _MINUTE_S * _MINUTE_S for moment in list(self._restarted_at)}
        return {minute for minute in minutes if minute >= self._first_tick}

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def scope(fixture_name: str, config: pytest.Config) -> ScopeName:
    """Use one trial per module to save a minute, or one per test with planted faults."""
    return "function" if config.getoption("twins") else "module"


@pytest.fixture(scope=scope)
def schedulers(servers: Servers, figures: Figures, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarted]:
    """Run beside the other test of this module, which mostly waits."""
    with Trial(servers, tmp_path_factory.mktemp("schedulers"), [STATUSES], shortened=False) as trial:
        restarted = Restarted(trial, figures)
        yield restarted
        restarted.end()


def test_killed_worker_is_taken_over_within_90_seconds(  # issue: done when
    schedulers: Restarted, make_trial: MakeTrial, undisturbed: Undisturbed, figures: Figures
) -> None:
    trial = make_trial(FIVE, shortened=False)
    worker = trial.worker()
    trial.hold_first_round("commit", 2, worker)

    trial.kill(worker)
    killed_at = time.time()
    figures.faults["SIGKILL with default settings"] += 1
    successor = trial.worker()
    drain(trial, successor, expected=undisturbed, patience_s=_TWO_MINUTES_S)
    began = [trial.recorder.taken_over_at(family.actor, killed_at) or 0 for family in FIVE]
    took = [at - killed_at for at in began]
    figures.takeovers["default settings"] = took

    assert all(0 < seconds < TAKEN_OVER_WITHIN_S for seconds in took), took
    assert verdict(trial, undisturbed, figures) == []


def test_two_killed_and_restarted_schedulers_send_each_tick_once(schedulers: Restarted) -> None:  # S1, F7
    eventually(schedulers.ticks_met_again, patience_s=_TWO_MINUTES_S)
    eventually(lambda: schedulers.ticks_met_again() <= set(schedulers.rows_of_ticks()), patience_s=_MINUTE_S)

    assert {rows for rows in schedulers.rows_of_ticks().values()} == {1}
