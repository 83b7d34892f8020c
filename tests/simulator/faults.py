"""Faults of a schedule, drawn at random for each one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Final, TypeVar

import redis
from peewee import OperationalError

from tests.simulator.world import Killed, Process, Task, World

T = TypeVar("T")

#: Faults at a point of I/O, before or after its effect.
KINDS: Final = (
    "kill before",
    "kill after",
    "pause before",
    "pause after",
    "pause in a transaction",
    "lost before",
    "lost after",
    "late delivery",
    "redis emptied",
    "redis away",
    "postgres away",
    "clock step",
    "stop",
)
_ZOMBIE: Final = "pause in a transaction"
_LATE: Final = "late delivery"
_ZOMBIES_CHANCE: Final = 0.05  # only few points qualify
_PAUSES_S: Final = (2.0, 12.0, 35.0, 65.0, 130.0)  # around the existing ttls and timeouts
_TIMEOUT_S: Final = 5.0  # client timeout for Redis
#: Delay of a late delivery after its consumer gave up. A consumer reconnects after three seconds.
_LATE_S: Final = (0.1, 2.0, 4.0, 10.0)
#: Longer than a sweep's lease, and shorter than the idle-in-transaction timeout.
_IN_A_TRANSACTION_S: Final = 50.0
#: Clock steps of a scheduler.
_STEPS_S: Final = (-3600.0, -61.0, -7.0, 7.0, 61.0, 3600.0)
#: Differences of a worker's clock, also by more than the broker's heartbeat timeout.
_SMALL_STEPS_S: Final = (-90.0, -20.0, -3.0, 3.0, 20.0, 90.0)


class ScriptedFaults:
    """Faults of one schedule.

    Parameters:
      rng: The schedule's own.
      on_stop: Told the process that is asked to shut down.

    Attributes:
      struck: How often each kind did.
    """

    def __init__(self, rng: Random, on_stop: Callable[[Process], None]) -> None:
        self._rng = rng
        self._on_stop = on_stop
        self.kinds = rng.sample(KINDS, rng.choice((0, 1, 1, 2, 2, 3, len(KINDS))))
        self._chance = rng.choice((0.005, 0.015, 0.05)) if self.kinds else 0.0
        self._left = rng.choice((1, 2, 4, 8))
        self._slow = rng.choice((0.0, 0.01, 0.05))
        self.struck: Counter[str] = Counter()
        self.points = 0
        self.away_until = {"redis": 0.0, "postgres": 0.0, "outside": 0.0}
        self.on = True

    def around(self, world: World, task: Task, store: str, name: str, effect: Callable[[], T]) -> T:
        """Make a round trip to a store, with the faults drawn for it."""
        self.points += 1
        rng = self._rng
        world.sleep(rng.expovariate(1000.0) if rng.random() >= self._slow else rng.uniform(0.05, 6.0))
        kind = self._drawn(world, store, name)
        if kind is not None:
            self._strike(kind, world, task, store, name)
            if not task.process.alive:
                raise Killed
            if kind == _LATE:
                self._have_late(world, task, effect)
            if kind in ("lost before", _LATE):
                raise self._lost(world, task, store, name)
        if self.away_until[store] > world.now:
            world.sleep(0.01)
            raise self._lost(world, task, store, name)
        answer = effect()
        if kind is not None and kind.endswith("after"):
            self._strike_after(kind, world, task, store, name)
        return answer

    def _drawn(self, world: World, store: str, name: str) -> str | None:
        if not self.on or not self._left or not self.kinds:
            return None
        zombies = _ZOMBIE in self.kinds and store == "postgres" and world.shared["postgres"].in_transaction()
        if self._rng.random() >= (_ZOMBIES_CHANCE if zombies else self._chance):
            return None
        kind = _ZOMBIE if zombies else self._rng.choice(self.kinds)
        if kind == _ZOMBIE and not zombies:
            return None
        if store == "outside" and kind in ("lost before", "lost after"):
            return None
        if kind == _LATE and not name.endswith(" fetch"):
            return None
        self._left -= 1
        self.struck[kind] += 1
        return kind

    def _strike(self, kind: str, world: World, task: Task, store: str, name: str) -> None:
        process = task.process
        if not kind.endswith("after"):
            world.note("fault", kind, store, name)
        if kind == "kill before":
            world.kill(process)
        elif kind == "pause before":
            self._pause(world, task, self._rng.choice(_PAUSES_S))
        elif kind == _ZOMBIE:
            self._pause(world, task, _IN_A_TRANSACTION_S)
        elif kind == "redis emptied":
            world.shared["redis"].clear()
        elif kind in ("redis away", "postgres away"):
            self.away_until[kind.split()[0]] = world.now + self._rng.choice((0.5, 4.0, 20.0))
            if kind == "postgres away":
                world.shared["postgres"].close([each for other in world.processes for each in other.tasks])
        elif kind == "clock step":
            scheduling = process.name.startswith("scheduler")
            if scheduling:
                process.clock_offset += self._rng.choice(_STEPS_S)
            else:
                process.clock_offset = self._rng.choice(_SMALL_STEPS_S)
        elif kind == "stop":
            self._on_stop(process)

    def _strike_after(self, kind: str, world: World, task: Task, store: str, name: str) -> None:
        world.note("fault", kind, store, name)
        if kind == "kill after":
            world.kill(task.process)
            raise Killed
        if kind == "pause after":
            self._pause(world, task, self._rng.choice(_PAUSES_S))
        elif kind == "lost after":
            raise self._lost(world, task, store, name)

    def _have_late(self, world: World, task: Task, effect: Callable[[], object]) -> None:
        """Let the server act some time after the client gave up."""
        asker = replace(task, message_id=task.message_id)

        def do() -> None:
            if self.away_until["redis"] > world.now:
                return  # the connection is closed
            late, world.current = world.current, asker
            try:
                effect()
            except redis.RedisError:
                return  # the client does not see it
            finally:
                world.current = late

        world.sleep(_TIMEOUT_S)
        world.spawn(Process(task.process.name), _LATE, do, after=self._rng.choice(_LATE_S))

    def _pause(self, world: World, task: Task, length: float) -> None:
        process = task.process
        process.paused_until = max(process.paused_until, world.now + length)
        for each in process.tasks:
            world.shared["postgres"].end_idle(each, length)
        world.sleep(0.0)

    @staticmethod
    def _lost(world: World, task: Task, store: str, name: str) -> BaseException:
        world.note("connection lost", store, name, task.message_id)
        if store == "redis":
            return redis.ConnectionError("Connection closed by server.")
        if name == "COMMIT":
            world.shared["postgres"].rollback()
        return OperationalError("server closed the connection unexpectedly")
