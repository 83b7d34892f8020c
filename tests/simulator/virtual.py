"""Replacement of clock, random numbers and threads in this interpreter.

Only the run command does this, never a test's own process: nothing is put back.
"""

from __future__ import annotations

import datetime as datetime_module
import logging
import os
import platform
import random
import sys
import threading
import time
import uuid
from types import SimpleNamespace
from typing import Any

import dramatiq.brokers.redis
import dramatiq.middleware.threading
import dramatiq.worker
import periodiq

from tests.internals.core import thread_interrupt
from tests.internals.leases import renewal
from tests.simulator.virtual_threads import (
    Threading,
    VirtualConsumer,
    VirtualQueue,
    VirtualRenewals,
    VirtualWorkerThread,
    idle,
)
from tests.simulator.virtual_time import Pendulum, VirtualDatetime, elapsed, wall, world


def _interrupt(thread_id: int, exception: type[BaseException]) -> None:
    for process in world().processes:
        for task in process.tasks:
            if id(task) == thread_id and not task.run.dead:
                task.interrupt, task.deaf_for = exception(), world().rng.choice((0, 0, 1, 4, 8))


def _process_id() -> int:
    task = world().current
    return 1000 + (world().processes.index(task.process) if task is not None else 0)


def _cancel(section: object, thread_id: int) -> None:
    for process in world().processes:
        for task in process.tasks:
            if id(task) == thread_id:
                task.interrupt = None


def _sleep(seconds: float) -> None:
    world().sleep(seconds)


def _uuid4() -> uuid.UUID:
    return uuid.UUID(int=random.getrandbits(128), version=4)


def install(further: dict[Any, Any]) -> None:
    """Replace the clocks, random numbers and threads of the library, Dramatiq and periodiq.

    Parameters:
      further: More to be replaced, wherever a module has it by name.
    """
    logging.disable(logging.CRITICAL)
    replaced: dict[int, Any] = {
        id(time.time): wall,
        id(time.monotonic): elapsed,
        id(time.sleep): _sleep,
        id(uuid.uuid4): _uuid4,
        id(dramatiq.middleware.threading.raise_thread_exception): _interrupt,
        id(renewal.renewals): VirtualRenewals(),
        id(datetime_module.datetime): VirtualDatetime,
        id(threading): Threading(),
        **{id(original): other for original, other in further.items()},
    }
    for module in list(sys.modules.values()):
        family = getattr(module, "__name__", "").split(".")[0]
        if family in ("housekeeping", "dramatiq", "periodiq") or module in (time, uuid):
            for name, value in list(vars(module).items()):
                if value is threading and family != "housekeeping":
                    continue
                if id(value) in replaced:
                    setattr(module, name, replaced[id(value)])
    os.urandom = random.randbytes
    os.getpid = _process_id
    platform.node = lambda: "machine"
    renewal.read_clock = elapsed
    thread_interrupt._cancel = _cancel
    worker: Any = dramatiq.worker
    worker.ConsumerThread, worker.WorkerThread = VirtualConsumer, VirtualWorkerThread
    worker.PriorityQueue = VirtualQueue
    redis_broker: Any = dramatiq.brokers.redis
    redis_broker.RedisBroker._max_unpack_size_val = 4000
    # Only the sleep of its consumer is replaced.
    redis_broker.time = SimpleNamespace(sleep=idle, monotonic=elapsed)
    periodiq.pendulum = Pendulum
