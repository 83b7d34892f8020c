"""The world whose time it is, and what its clocks show."""

from __future__ import annotations

import datetime as datetime_module
import random
from datetime import tzinfo
from typing import Any

from tests.simulator import locks
from tests.simulator.world import START, World

_world: World | None = None


def enter(world: World) -> None:
    """Make this the world whose time it is, and whose chance decides."""
    global _world
    _world = world
    locks.between_tasks_of(world)
    random.seed(world.rng.getrandbits(64))


def world() -> World:
    """The world whose time it is."""
    assert _world is not None
    return _world


def wall() -> float:
    """What the wall clock of the process shows that runs."""
    here = world()
    return here.now + (here.current.process.clock_offset if here.current is not None else 0.0)


def elapsed() -> float:
    """Seconds of a clock that no step moves."""
    return world().now - START + 1000.0


class _LikeTheRealOne(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, datetime_module.datetime)


class VirtualDatetime(datetime_module.datetime, metaclass=_LikeTheRealOne):
    """A `datetime` whose now is the world's; to others it looks like the real one."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return datetime_module.datetime.fromtimestamp(wall(), tz)


class Pendulum:
    """What periodiq asks of pendulum."""

    @staticmethod
    def now() -> Any:
        return VirtualDatetime.now(datetime_module.UTC)
