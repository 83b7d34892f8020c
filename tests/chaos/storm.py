"""Random faults against a trial's processes, connections and servers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tests.acceptance.processes import Process
from tests.chaos.figures import Figures
from tests.chaos.trial import ServeTrial, Trial


class Victim(Protocol):
    """Runs a process that may be killed at any time.

    Attributes:
      process: None while it runs none.
    """

    process: Process | None

    def kill(self) -> None:
        """Kill the process. Another one takes its place, now or later."""


class Worker:
    """Worker process that is replaced when it is killed."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.process: Process | None = trial.worker()

    def kill(self) -> None:
        """Kill the process and start another one."""
        assert self.process is not None
        self._trial.kill(self.process)
        self.process = self._trial.worker()


class Storm:
    """Random faults.

    Parameters:
      chance: Decides everything.
    """

    def __init__(self, trial: Trial, chance: random.Random, figures: Figures, victims: Sequence[Victim]) -> None:
        self._trial = trial
        self._chance = chance
        self._figures = figures
        self._victims = victims
        self._deck: list[str] = []
        unused = "Redis" if isinstance(trial, ServeTrial) else "-"
        faults: dict[str, Callable[[], None]] = {
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
        self._faults = {name: fault for name, fault in faults.items() if unused not in name}

    def rage(self, seconds: float, work: Callable[[int], None]) -> None:
        """Add work and inject a fault, again and again, then repair everything.

        Parameters:
          work: Adds the work of a round, given its number from 1.
        """
        until = time.monotonic() + seconds
        round = 0
        while time.monotonic() < until:
            round += 1
            work(round)
            kind = self._next()
            self._figures.faults[kind] += 1
            self._faults[kind]()
            time.sleep(self._chance.uniform(0, 0.5))  # time until the next fault
        self._trial.postgres.slow_down(0)
        self._trial.postgres.cut_commits(0)

    @property
    def processes(self) -> list[Process]:
        """The processes that may be killed."""
        return [victim.process for victim in self._victims if victim.process is not None]

    def _next(self) -> str:
        if not self._deck:  # every kind once, in random order
            self._deck = self._chance.sample(sorted(self._faults), len(self._faults))
        return self._deck.pop()

    def _victim(self) -> Victim:
        """Choose a victim whose process runs; if none does, any."""
        running = [each for each in self._victims if each.process is not None and each.process.running.poll() is None]
        return self._chance.choice(running or self._victims)

    def _kill(self) -> None:
        self._victim().kill()

    def _stop(self) -> None:
        process = self._victim().process
        if process is None or process.running.poll() is not None:
            return
        process.pause()
        time.sleep(self._chance.uniform(0.5, 4))  # sometimes past the ttl
        process.unpause()

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
