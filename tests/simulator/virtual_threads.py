"""Tasks in place of threads: Dramatiq's workers, queues, events, timers, lease renewals."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty
from typing import Any, Final

import dramatiq.worker

from tests.internals.leases import Renewal
from tests.simulator.virtual_time import elapsed, wall, world
from tests.simulator.world import Task

#: Polling interval of an idle consumer, well within the heartbeat timeout of a minute.
_IDLE_S: Final = 40.0


class VirtualQueue:
    """Priority queue between the tasks of a process."""

    def __init__(self) -> None:
        self._heap: list[Any] = []
        self._waiting: list[Task] = []
        self.unfinished_tasks = 0

    def put(self, item: Any) -> None:
        heapq.heappush(self._heap, item)
        self.unfinished_tasks += 1
        for task in self._waiting:
            world().wake(task)
        self._waiting = []

    def get(self, timeout: float) -> Any:
        if not self._heap:
            task = world().current
            assert task is not None
            self._waiting.append(task)
            world().block(timeout)
            if task in self._waiting:
                self._waiting.remove(task)
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._heap:
            raise Empty
        return heapq.heappop(self._heap)

    def task_done(self) -> None:
        self.unfinished_tasks -= 1


class _Virtual(threading.Thread):
    """Thread as a task of the process that starts it."""

    task: Task | None = None

    def start(self) -> None:
        task = world().current
        assert task is not None
        self.task = world().spawn(task.process, type(self).__name__, self.run)

    def is_alive(self) -> bool:
        return self.task is not None and not self.task.run.dead

    def join(self, timeout: float | None = None) -> None:
        deadline = elapsed() + (timeout or 600.0)
        while self.is_alive() and elapsed() < deadline:
            world().sleep(0.2)


class VirtualConsumer(_Virtual, dramatiq.worker.ConsumerThread):
    """Dramatiq's consumer as a task. When idle, it polls for new messages and for its heartbeat."""

    def run(self) -> None:
        task = world().current
        assert task is not None
        task.locals["consumer"] = self
        super().run()


def idle(_: float) -> None:
    """Wait in place of the growing pauses between two polls."""
    here = world()
    task = here.current
    assert task is not None
    consumer: VirtualConsumer = task.locals["consumer"]
    until = here.now + _IDLE_S
    for item in consumer.delay_queue._heap[:1]:  # type: ignore[attr-defined]
        until = min(until, here.now + max(item.priority / 1000 - wall(), 0.0) + 0.001)
    idle = here.shared.setdefault("idle", {})
    idle[task] = consumer.queue_name
    here.block(until - here.now)
    idle.pop(task, None)


def something_queued(queue_name: str) -> None:
    """Wake the idle consumers of a queue, each a little later."""
    here = world()
    idle = here.shared.get("idle", {})
    there = [task for task, name in idle.items() if name == queue_name and _is_awake(task)]
    here.rng.shuffle(there)
    for task in there[: here.rng.choice((1, 1, 2, 3))]:
        del idle[task]
        here.wake(task, here.rng.choice((0.0, 0.0, 0.3, 2.0)))


def _is_awake(task: Task) -> bool:
    return task.process.alive and task.process.paused_until <= world().now


class VirtualWorkerThread(_Virtual, dramatiq.worker.WorkerThread):
    """Dramatiq's worker thread as a task."""

    def process_message(self, message: Any) -> None:
        task = world().current
        assert task is not None
        task.message_id, task.since = message.message_id, world().now
        world().note("delivered", message.actor_name, message.message_id)
        super().process_message(message)
        task.message_id = None


class VirtualEvent:
    """`threading.Event` between tasks."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for task in self._waiting:
            world().wake(task)
        self._waiting = []

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        task = world().current
        assert task is not None
        if not self._set:
            self._waiting.append(task)
            world().block(timeout)
            if task in self._waiting:
                self._waiting.remove(task)
        return self._set


class VirtualTimer:
    """`threading.Timer` as a task of the process that starts it."""

    daemon = True

    def __init__(self, interval: float, function: Callable[..., Any], args: Any = ()) -> None:
        self._interval, self._function, self._args = interval, function, args
        self._cancelled = False

    def start(self) -> None:
        task = world().current
        assert task is not None
        world().spawn(task.process, "timer", self._run, after=self._interval)

    def cancel(self) -> None:
        self._cancelled = True

    def _run(self) -> None:
        if not self._cancelled:
            self._function(*self._args)


class VirtualRenewals:
    """`Renewals` with a task per renewal in place of its two threads."""

    def start(
        self,
        name: str,
        renew: Callable[[], bool],
        ttl: timedelta,
        since: float,
        on_lost: Callable[[], object] | None = None,
        **more: Any,
    ) -> Renewal:
        kept = Renewal(name, renew, ttl, since, elapsed, on_lost, **more)
        task = world().current
        assert task is not None
        for_whom = task.message_id

        def go_on() -> None:
            current = world().current
            assert current is not None
            current.message_id = for_whom
            while not kept.stopped:
                world().sleep(kept.due_at - elapsed())
                if kept.stopped or not kept.step():
                    break
            kept.notify_if_lost()

        def watch() -> None:
            while not kept.stopped and kept.notify_at != math.inf:
                world().sleep(kept.notify_at - elapsed() + 0.001)
                kept.notify_if_lost()

        world().spawn(task.process, f"renewal of {name}", go_on)
        if on_lost is not None:
            world().spawn(task.process, f"watch over {name}", watch)
        return kept

    def stop(self, kept: Renewal) -> None:
        kept.stop()


class PerTask:
    """`threading.local` per task."""

    def __init__(self, made_like: threading.local) -> None:
        object.__setattr__(self, "_kind", type(made_like))

    def _own(self) -> Any:
        task = world().current
        kept = world().shared.setdefault("locals", {}) if task is None else task.locals
        if self not in kept:
            kept[self] = object.__getattribute__(self, "_kind")()
        return kept[self]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own(), name, value)


def thread_locals_by_task(owner: Any) -> None:
    """Replace an object's thread-local state by task-local state."""
    for name, value in list(vars(owner).items()):
        if isinstance(value, threading.local):
            setattr(owner, name, PerTask(value))


class Threading:
    """Module `threading` whose threads are tasks."""

    Timer = VirtualTimer
    Event = VirtualEvent

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    @staticmethod
    def get_ident() -> int:
        return id(world().current)

    @staticmethod
    def Thread(target: Callable[..., Any], args: Any = (), daemon: bool = True, **_: Any) -> VirtualTimer:
        return VirtualTimer(0.0, target, args)
