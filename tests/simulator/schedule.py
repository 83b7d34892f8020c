"""One schedule, from its seed to its verdict."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from tests.internals.ledger import SILENCE
from tests.simulator import virtual_time
from tests.simulator.faults import ScriptedFaults
from tests.simulator.invariants_leases import LEASE_KEYS
from tests.simulator.invariants_ledger import LEDGER
from tests.simulator.invariants_messages import MESSAGES
from tests.simulator.invariants_ticks import TICKS
from tests.simulator.observed_store import ObservedStore
from tests.simulator.postgres import Postgres
from tests.simulator.processes import Cast
from tests.simulator.stage import Stage
from tests.simulator.workload import ACTORS, SCHEDULED, SWEEPS, rows, utc
from tests.simulator.world import StuckSchedule, World

_DISTURBED_S: Final = (60.0, 150.0)
_QUIET_S: Final = 130.0  # two ticks without faults
_DRAIN_S: Final = 900.0  # by then everything has ended, including failing retries


@dataclass
class Verdict:
    """Result of a schedule.

    Attributes:
      broken: The invariants that do not hold, each with the reason.
      struck: Faults by kind.
      points: Points of I/O.
    """

    seed: int
    broken: list[str]
    history: list[tuple[Any, ...]]
    struck: Counter[str] = field(default_factory=Counter)
    points: int = 0

    @property
    def digest(self) -> str:
        """Return a digest that is equal for equal histories."""
        return hashlib.sha256("\n".join(map(repr, self.history)).encode()).hexdigest()[:16]


def set_up(seed: int) -> Stage:
    """Return a new world."""
    world = World(seed, None)  # type: ignore[arg-type]
    virtual_time.enter(world)
    rng = world.rng
    names = rng.sample([*ACTORS, *SWEEPS], rng.choice((1, 2, 3)))
    cast = Cast(world, names, threads=rng.choice((1, 1, 2)))
    faults = ScriptedFaults(rng, cast.stop)
    world.faults = faults
    redis, postgres = ObservedStore(world), Postgres(world)
    world.shared |= {"redis": redis, "postgres": postgres, "deleted": set(), "supervisor": world.process("supervisor")}
    for name in set(SWEEPS) & set(names):
        postgres.committed[name] = dict(rows(rng, world.now))
    return Stage(world, faults, redis, postgres, cast)


def judged(seed: int) -> Verdict:
    """Play a schedule and check all invariants."""
    stage, broken = play(seed)
    for invariant in (*LEDGER, *MESSAGES, *LEASE_KEYS, *TICKS):
        broken += [f"{invariant.__name__}: {reason}" for reason in invariant(stage)]
    return Verdict(seed, broken, stage.world.history, stage.faults.struck, stage.faults.points)


def play(seed: int) -> tuple[Stage, list[str]]:
    """Play a schedule and return the errors on the way."""
    stage = set_up(seed)
    world, rng, cast = stage.world, stage.world.rng, stage.cast
    try:
        for _ in range(rng.choice((1, 2, 2, 3))):
            cast.start("worker", cast.worker)
        if set(SCHEDULED) & set(cast.names):
            for _ in range(rng.choice((1, 1, 2))):
                cast.start("scheduler", cast.scheduler)
        cast.start("sender", cast.sender)
        world.run(world.now + rng.uniform(*_DISTURBED_S))
        stage.faults.on = False
        for process in world.processes:
            process.clock_offset = 0.0  # the clocks are corrected
        world.note("faults end")
        if set(SCHEDULED) & set(cast.names):
            awake = max(process.paused_until for process in world.processes if process.alive)
            undisturbed = max(world.now, awake, *stage.faults.away_until.values())  # a server may still be unreachable
            world.run(undisturbed + _QUIET_S)
            while _behind(stage, undisturbed) and world.now < undisturbed + _DRAIN_S:
                world.run(world.now + 10.0)
        for process in [each for each in world.processes if each.alive and each.name.startswith("scheduler")]:
            process.at_death.clear()
            world.kill(process)
        world.note("schedulers end")
        # Messages delayed by a clock that was an hour ahead come an hour late.
        deadline = world.now + _DRAIN_S + (8000.0 if stage.struck("clock step") else 0.0)
        while not _quiet(stage) and world.now < deadline:
            world.run(world.now + 10.0)
        world.note("end")
        return stage, [] if _quiet(stage) else ["everything ends: " + _left(stage)]
    except StuckSchedule as stuck:
        return stage, [f"everything ends: {stuck}"]
    finally:
        world.end()


def _behind(stage: Stage, since: float) -> bool:
    """Return whether the scheduled sweep has had no undisturbed run yet."""
    if "swept" not in stage.postgres.committed or stage.clock_stepped("scheduler"):
        return False
    whole: set[int] = set()
    for when, _, what, worker, run_id, *more in stage.events("run began", "run ended"):
        if worker == "swept" and what == "run began" and when >= since and more[2] is None:
            whole.add(run_id)
        elif run_id in whole and what == "run ended" and more[1] == "done":
            return False
    return True


def _quiet(stage: Stage) -> bool:
    # The row of a dead run stays open until its worker runs again, so it is no sign of work.
    alive = utc(stage.world.now) - SILENCE
    return not stage.redis.waiting() and not any(
        row["outcome"] is None and row["heartbeat_at"] > alive for row in stage.runs.values()
    )


def _left(stage: Stage) -> str:
    waiting = [(each["actor_name"], each["message_id"]) for each in stage.redis.waiting()]
    runs = [key for key, row in stage.runs.items() if row["outcome"] is None]
    return f"messages {waiting}, runs {runs}"
