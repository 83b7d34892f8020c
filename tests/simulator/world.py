"""The virtual clock, and the simulated processes that take turns by it: one runs, all others wait for their time."""

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

#: When every schedule begins, by all clocks.
START: Final = datetime(2026, 3, 2, 8, 58, 30, tzinfo=UTC).timestamp()
_FEW: Final = 60_000  # a schedule takes some hundred steps; one that takes so many goes round in circles


class Killed(BaseException):
    """Ends the tasks of a process that was killed; what they do on their way out reaches nobody."""


class StuckSchedule(BaseException):
    """The schedule does not come to an end."""


class Faults(Protocol):
    """Decides what goes wrong at a point where a process does I/O."""

    def around(self, world: World, task: Task, store: str, name: str, effect: Callable[[], T]) -> T:
        """Have the effect, or not, or something else besides."""


@dataclass(eq=False)
class Process:
    """A simulated process: tasks that live and die together, and a clock that may be wrong."""

    name: str
    alive: bool = True
    paused_until: float = 0.0
    clock_offset: float = 0.0  # seconds its wall clock is ahead
    tasks: list[Task] = field(default_factory=list)
    at_death: list[Callable[[], None]] = field(default_factory=list)
    clean: bool = True  # whether no fault has struck it yet


@dataclass(eq=False)
class Task:
    """What is a thread in reality: a greenlet, because a switch costs a microsecond and the order is ours."""

    process: Process
    name: str
    run: greenlet
    turn: int = 0  # counts its waits; a wake-up for an earlier one is void
    interrupt: BaseException | None = None  # raised where it does I/O
    deaf_for: int = 0  # points of I/O before that: an interrupt waits for a call into C to return
    locals: dict[object, Any] = field(default_factory=dict)  # what threads keep for themselves
    message_id: str | None = None  # the message it is at work on
    since: float = math.inf  # when that was delivered


class World:
    """One schedule's time and tasks.

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
        """Record what happened now."""
        self.history.append((self.now, self.where, what, *details))

    @property
    def where(self) -> str:
        """The process that runs; the world itself outside of any."""
        return self.current.process.name if self.current is not None else "world"

    def process(self, name: str) -> Process:
        """A new process, which does nothing yet."""
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
        """Let everybody go on until a moment."""
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
        """Let time pass for the task that runs."""
        task = self.current
        if task is None:
            return
        due = self.now + max(seconds, 0.0)
        process = task.process
        if process.alive and process.paused_until <= due and (not self._heap or self._heap[0][0] > due):
            self.now = due  # nobody else's turn comes before
            self._count()
            return
        self._wake_at(task, due)
        self._yield(task)

    def block(self, seconds: float | None = None) -> bool:
        """Wait to be woken, or for so many seconds; returns whether it was woken."""
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
        """End the task's wait, at once or after some seconds."""
        self._wake_at(task, self.now + after)

    def kill(self, process: Process) -> None:
        """End a process: none of its tasks does anything more, and servers see its connections end."""
        self.note("killed", process.name)
        process.alive, process.clean = False, False
        for effect in process.at_death:
            effect()
        for task in process.tasks:
            if task is not self.current:
                self.wake(task)

    def io(self, store: str, name: str, effect: Callable[[], T]) -> T:
        """A point where the code does I/O: others may come before it, and anything may go wrong."""
        task = self.current
        if task is None:
            return effect()
        if not task.process.alive:
            raise Killed
        self.raise_interrupt(task)
        return self.faults.around(self, task, store, name, effect)

    def raise_interrupt(self, task: Task) -> None:
        """Raise what was to interrupt the task."""
        if task.interrupt is None:
            return
        if task.deaf_for:
            task.deaf_for -= 1
            return
        interrupt, task.interrupt = task.interrupt, None
        raise interrupt

    def end(self) -> None:
        """End all that is left, so that nothing stays in memory."""
        for process in self.processes:
            process.alive = False
            for task in process.tasks:
                if task.run:  # begun and not over
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
