"""Virtual clock and simulated processes. One runs while all others wait for their time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any, Final, Protocol, TypeVar

from greenlet import getcurrent, greenlet

T = TypeVar("T")

#: Start of every schedule on all clocks.
START: Final = datetime(2026, 3, 2, 8, 58, 30, tzinfo=UTC).timestamp()
_FEW: Final = 60_000  # a schedule takes some hundred steps; more than this is an endless loop


class Killed(BaseException):
    """Exception that ends the tasks of a killed process without further effects."""


class StuckSchedule(BaseException):
    """Error of a schedule that does not end."""


class Faults(Protocol):
    """Source of faults at points of I/O."""

    def around(self, world: World, task: Task, store: str, name: str, effect: Callable[[], T]) -> T:
        """Apply the effect with or without a fault."""


@dataclass(eq=False)
class Process:
    """Simulated process with its tasks and a clock that may be wrong."""

    name: str
    alive: bool = True
    paused_until: float = 0.0
    clock_offset: float = 0.0  # seconds by which its wall clock is ahead
    tasks: list[Task] = field(default_factory=list)
    at_death: list[Callable[[], None]] = field(default_factory=list)
    clean: bool = True  # whether it has had no fault yet


@dataclass(eq=False)
class Task:
    """Simulated thread. It is a greenlet, so that the world decides the order and a switch costs a microsecond."""

    process: Process
    name: str
    run: greenlet
    turn: int = 0  # number of its waits; wake-ups for earlier ones are ignored
    interrupt: BaseException | None = None  # raised at its next point of I/O
    deaf_for: int = 0  # points of I/O until then: an interrupt waits for C calls
    locals: dict[object, Any] = field(default_factory=dict)  # thread-local state
    message_id: str | None = None  # its current message
    since: float = math.inf  # delivery time of the message


class World:
    """Time and tasks of one schedule.

    Parameters:
      seed: Decides everything.
    """

    def __init__(self, seed: int, faults: Faults) -> None:
        self.rng = Random(seed)
        self.faults = faults
        self.now = START
        self.current: Task | None = None
        self.processes: list[Process] = []
        self.steps = 0
        self.history: list[tuple[Any, ...]] = []
        self.failure: BaseException | None = None
        self.shared: dict[str, Any] = {}
        self._hub = getcurrent()
        self._heap: list[tuple[float, int, Task, int]] = []
        self._order = itertools.count()

    def note(self, what: str, *details: Any) -> None:
        """Record an event."""
        self.history.append((self.now, self.where, what, *details))

    @property
    def where(self) -> str:
        """Return the running process, or the world outside of any."""
        return self.current.process.name if self.current is not None else "world"

    def process(self, name: str) -> Process:
        """Return a new process without tasks."""
        made = Process(name)
        self.processes.append(made)
        return made

    def spawn(self, process: Process, name: str, work: Callable[[], object], after: float = 0.0) -> Task:
        """Start a task of a process."""

        def run() -> None:
            try:
                if process.alive:
                    work()
            except Killed:
                if process.alive:
                    raise
            except BaseException as error:
                self.failure = self.failure or error
                self.note("task broke", name, repr(error))

        task = Task(process, name, greenlet(run, parent=self._hub))
        process.tasks.append(task)
        self._wake_at(task, self.now + after)
        return task

    def run(self, until: float) -> None:
        """Run all tasks until a time."""
        while self._heap and self._heap[0][0] <= until:
            due, _, task, turn = heapq.heappop(self._heap)
            if turn != task.turn or task.run.dead:
                continue
            if task.process.paused_until > due and task.process.alive:
                self._push(task, task.process.paused_until)
                continue
            self.now = max(self.now, due)
            task.turn += 1
            self._count()
            self.current = task
            task.run.switch()
            self.current = None
            if self.failure is not None:
                raise self.failure
        self.now = max(self.now, until)

    def sleep(self, seconds: float) -> None:
        """Let the running task sleep."""
        task = self.current
        if task is None:
            return
        due = self.now + max(seconds, 0.0)
        process = task.process
        if process.alive and process.paused_until <= due and (not self._heap or self._heap[0][0] > due):
            self.now = due  # no other task is due before
            self._count()
            return
        self._wake_at(task, due)
        self._yield(task)

    def block(self, seconds: float | None = None) -> bool:
        """Wait for a wake-up, or this many seconds. Return whether the task was woken."""
        task = self.current
        assert task is not None
        due = None if seconds is None else self.now + seconds
        if due is not None:
            self._wake_at(task, due)
        else:
            task.turn += 1
        self._yield(task)
        return due is None or self.now < due

    def wake(self, task: Task, after: float = 0.0) -> None:
        """Wake a task, at once or after some seconds."""
        self._wake_at(task, self.now + after)

    def kill(self, process: Process) -> None:
        """Kill a process with its tasks and connections."""
        self.note("killed", process.name)
        process.alive, process.clean = False, False
        for effect in process.at_death:
            effect()
        for task in process.tasks:
            if task is not self.current:
                self.wake(task)

    def io(self, store: str, name: str, effect: Callable[[], T]) -> T:
        """Pass a point of I/O: other tasks may run first, and faults may happen."""
        task = self.current
        if task is None:
            return effect()
        if not task.process.alive:
            raise Killed
        self.raise_interrupt(task)
        return self.faults.around(self, task, store, name, effect)

    def raise_interrupt(self, task: Task) -> None:
        """Raise the task's pending interrupt."""
        if task.interrupt is None:
            return
        if task.deaf_for:
            task.deaf_for -= 1
            return
        interrupt, task.interrupt = task.interrupt, None
        raise interrupt

    def end(self) -> None:
        """End all remaining tasks to free their memory."""
        for process in self.processes:
            process.alive = False
            for task in process.tasks:
                if task.run:  # started and not ended
                    self.current = task
                    task.run.throw(Killed)
        self.current = None

    def _yield(self, task: Task) -> None:
        self._hub.switch()
        if not task.process.alive:
            raise Killed
        self.raise_interrupt(task)

    def _wake_at(self, task: Task, due: float) -> None:
        task.turn += 1
        self._push(task, due)

    def _push(self, task: Task, due: float) -> None:
        heapq.heappush(self._heap, (due, next(self._order), task, task.turn))

    def _count(self) -> None:
        self.steps += 1
        if self.steps > _FEW:
            raise StuckSchedule(f"no end after {self.steps} steps")
