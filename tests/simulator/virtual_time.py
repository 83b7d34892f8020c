"""Current world and its clocks."""

from __future__ import annotations

import datetime as datetime_module
import random
from datetime import tzinfo
from typing import Any

from tests.simulator import locks
from tests.simulator.world import START, World

_world: World | None = None


def enter(world: World) -> None:
    """Make this the current world."""
    global _world
    _world = world
    locks.between_tasks_of(world)
    random.seed(world.rng.getrandbits(64))


def world() -> World:
    """Return the current world."""
    assert _world is not None
    return _world


def wall() -> float:
    """Return the wall clock of the running process."""
    here = world()
    return here.now + (here.current.process.clock_offset if here.current is not None else 0.0)


def elapsed() -> float:
    """Return the monotonic clock in seconds."""
    return world().now - START + 1000.0


class _LikeTheRealOne(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, datetime_module.datetime)


class VirtualDatetime(datetime_module.datetime, metaclass=_LikeTheRealOne):
    """`datetime` on the virtual clock that passes for the real one."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return datetime_module.datetime.fromtimestamp(wall(), tz)


class Pendulum:
    """The part of pendulum that periodiq uses."""

    @staticmethod
    def now() -> Any:
        return VirtualDatetime.now(datetime_module.UTC)
