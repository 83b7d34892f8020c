"""Locks between tasks. Import this before the library, whose classes keep a reference to `threading.Lock`."""

from __future__ import annotations

import threading
from typing import Any

from tests.simulator.world import Task, World

_real: Any = threading.Lock
_here: list[World] = []  # world whose tasks run, if any


def between_tasks_of(world: World) -> None:
    """Make new locks of this world's tasks virtual."""
    _here[:] = [world]


class VirtualLock:
    """`threading.Lock` between tasks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = False
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        while self._held:
            task = self._world.current
            if not blocking or task is None:
                return False
            self._waiting.append(task)
            woken = self._world.block(None if timeout < 0 else timeout)
            if not woken:
                return False
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._world.wake(task)

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _lock() -> Any:
    """Return a virtual lock inside a task, else a real one."""
    if _here and _here[0].current is not None:
        return VirtualLock(_here[0])
    return _real()


def install() -> None:
    """Replace `threading.Lock` in this interpreter."""
    module: Any = threading
    module.Lock = _lock
