"""Test of random faults against two workers: nothing is lost or repeated."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

import pytest

from tests.chaos.conftest import MakeTrial
from tests.chaos.families import FOUR
from tests.chaos.figures import Figures
from tests.chaos.test_zombies import asleep, awake
from tests.chaos.trial import Trial
from tests.chaos.verdicts import Undisturbed, drain, verdict

#: Duration of the faults.
LONG_S: Final = 40.0
SHORT_S: Final = 10.0


class Storm:
    """Two workers under random faults.

    Parameters:
      chance: Decides everything.
    """

    def __init__(self, trial: Trial, chance: random.Random, figures: Figures) -> None:
        self._trial = trial
        self._chance = chance
        self._figures = figures
        self._deck: list[str] = []
        self.workers = [trial.worker(), trial.worker()]
        self._faults: dict[str, Callable[[], None]] = {
            "SIGKILL at random": self._kill,
            "SIGSTOP at random": self._stop,
            "pg_terminate_backend of one": self._terminate,
            "PostgreSQL restarted": self._restart_postgres,
            "PostgreSQL killed": self._kill_postgres,
            "Redis restarted empty": self._restart_redis,
            "connections to PostgreSQL cut": lambda: self._cut("postgres"),
            "connections to Redis cut": lambda: self._cut("redis"),
            "PostgreSQL silent": lambda: self._freeze("postgres"),
            "Redis silent": lambda: self._freeze("redis"),
            "PostgreSQL slow": self._slow,
            "cut in the middle of an answer": self._cut_somewhere,
            "connection cut after COMMIT was forwarded": lambda: trial.postgres.cut_commits(1),
        }

    def rage(self, seconds: float) -> None:
        """Add work, send messages and inject faults for some time, then repair everything."""
        until = time.monotonic() + seconds
        round = 0
        while time.monotonic() < until:
            round += 1
            self._trial.fill(round)
            self._trial.tick([round])
            kind = self._next()
            self._figures.faults[kind] += 1
            self._faults[kind]()
            time.sleep(self._chance.uniform(0, 0.5))  # time until the next fault
        self._trial.postgres.slow_down(0)
        self._trial.postgres.cut_commits(0)

    def _next(self) -> str:
        if not self._deck:  # every kind once, in random order
            self._deck = self._chance.sample(sorted(self._faults), len(self._faults))
        return self._deck.pop()

    def _victim(self) -> int:
        return self._chance.randrange(len(self.workers))

    def _kill(self) -> None:
        victim = self._victim()
        self._trial.kill(self.workers[victim])
        self.workers[victim] = self._trial.worker()

    def _stop(self) -> None:
        victim = self.workers[self._victim()]
        asleep(victim)
        time.sleep(self._chance.uniform(0.5, 4))  # sometimes past the ttl
        awake(victim)

    def _terminate(self) -> None:
        for pid in self._trial.backends()[:1]:
            self._trial.place.rows("SELECT pg_terminate_backend(%s)", pid)

    def _restart_postgres(self) -> None:
        self._trial.servers.restart("postgres")
        self._trial.reconnect()

    def _kill_postgres(self) -> None:
        self._trial.servers.kill("postgres")
        self._trial.servers.start("postgres")
        self._trial.reconnect()

    def _restart_redis(self) -> None:
        self._trial.servers.restart("redis")

    def _cut(self, server: str) -> None:
        getattr(self._trial, server).cut()

    def _freeze(self, server: str) -> None:
        proxy = getattr(self._trial, server)
        proxy.freeze()
        time.sleep(self._chance.uniform(0.2, 4))
        proxy.thaw()

    def _slow(self) -> None:
        self._trial.postgres.slow_down(self._chance.choice([0, 0.005, 0.02]))

    def _cut_somewhere(self) -> None:
        self._trial.postgres.cut_after(self._chance.randrange(1, 20_000))


def test_random_faults_lose_and_repeat_nothing(
    make_trial: MakeTrial, undisturbed: Undisturbed, figures: Figures, pytestconfig: pytest.Config
) -> None:
    seed = pytestconfig.getoption("chaos_seed") or random.SystemRandom().randrange(1_000_000)
    figures.seeds.append(seed)
    trial = make_trial(FOUR)
    storm = Storm(trial, random.Random(seed), figures)

    storm.rage(SHORT_S if pytestconfig.getoption("chaos") == "short" else LONG_S)
    drain(trial, *storm.workers, expected=undisturbed)

    assert verdict(trial, undisturbed, figures) == [], f"run it again with --chaos-seed {seed}"
