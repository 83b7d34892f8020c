"""Heartbeats of this worker or scheduler process, so that its death is noticed."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import redis
from dramatiq import Broker, MessageProxy, Middleware, Worker
from dramatiq.common import q_name

import housekeeping
from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.termination import exit_on
from housekeeping.database.connection import database
from housekeeping.middleware.dramatiq_internals import called_by_periodiq
from housekeeping.sweeps.processes import heartbeats
from housekeeping.sweeps.processes.heartbeats import Heartbeat, Kind, RedisHeartbeats

logger = named_logger(__name__)

_LAST_HEARTBEAT_S: Final = 5.0  # time for the last heartbeat when the process ends
#: A scheduler wakes up every minute. One that has not for so long hangs, and sends no more heartbeats.
AWAKE: Final = timedelta(minutes=3)


class Heartbeats(Middleware):
    """Middleware that sends heartbeats of a worker process from threads of its own.

    Messages never wait for heartbeats. Busy threads are counted in memory, and an outage of Redis or the database costs
    one log line.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._store = RedisHeartbeats(client, namespace)
        self._busy: set[int] = set()
        self._sender: Sender | None = None

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        self._sender = Sender(self._store, "worker", lambda: self._describe(worker))
        self._sender.start()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        if self._sender is not None:
            self._sender.stop()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        self._busy.add(threading.get_ident())

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._busy.discard(threading.get_ident())

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self._busy.discard(threading.get_ident())

    def _describe(self, worker: Worker) -> dict[str, Any]:
        queues = sorted({q_name(queue) for queue in list(worker.consumers)})
        return {"queues": queues, "threads": worker.worker_threads, "busy": len(self._busy)}


class SchedulerHeartbeats:
    """Heartbeats of a process that runs periodiq, from its first wake-up on; any other process sends none."""

    def __init__(self, client: redis.Redis, namespace: str, awake: timedelta = AWAKE) -> None:
        self._awake = awake
        self._store = RedisHeartbeats(client, namespace)
        self._sender: Sender | None = None
        self._woke_at = 0.0

    def wake(self) -> None:
        """Record a wake-up of the scheduler."""
        self._woke_at = time.monotonic()
        if self._sender is None and called_by_periodiq():
            self._sender = Sender(self._store, "scheduler", self._while_awake)
            self._sender.start()
            _call_at_exit(self._sender.stop)

    def _while_awake(self) -> dict[str, Any] | None:
        return {} if time.monotonic() - self._woke_at < self._awake.total_seconds() else None


class Sender:
    """Sender of this process's heartbeats to Redis, and to the database if there is one.

    Parameters:
      describe: Returns the fields that change between heartbeats, or None to send none now.
    """

    def __init__(self, store: RedisHeartbeats, kind: Kind, describe: Callable[[], dict[str, Any] | None]) -> None:
        self._kind = kind
        self._describe = describe
        self._id = uuid4().hex
        self._began = time.monotonic()
        self._stopping = threading.Event()
        # A thread for each, so that a server that does not answer delays no heartbeat to the other.
        self._threads = [self._thread("redis", store.write)]
        if database.obj is not None:
            self._threads.append(self._thread("database", heartbeats.write_row))

    def start(self) -> None:
        """Start sending a heartbeat now and then one per interval; returns at once."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Send a last heartbeat that marks the process as stopped, and wait a few seconds for it."""
        self._stopping.set()
        deadline = time.monotonic() + _LAST_HEARTBEAT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _thread(self, where: str, write: Callable[[str, Heartbeat], None]) -> threading.Thread:
        return threading.Thread(target=self._send, args=(where, write), name=f"heartbeats-{where}", daemon=True)

    def _send(self, where: str, write: Callable[[str, Heartbeat], None]) -> None:
        failing, stopped = False, False
        while not stopped:
            stopped = self._stopping.is_set()
            try:
                heartbeat = self._heartbeat(stopped)
                if heartbeat is not None:
                    write(self._id, heartbeat)
                if failing:
                    logger.info("Heartbeats are sent again", to=where)
                failing = False
            except Exception as error:
                if not failing:
                    logger.warning("Heartbeats cannot be sent, tried again", to=where, error=error_line(error))
                failing = True
            if not stopped:
                self._stopping.wait(heartbeats.INTERVAL.total_seconds())

    def _heartbeat(self, stopped: bool) -> Heartbeat | None:
        fields = self._describe()
        if fields is None:
            return None
        heartbeat = Heartbeat(
            kind=self._kind,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=housekeeping.__version__,
            up_s=time.monotonic() - self._began,
            stopped=stopped,
            **fields,
        )
        _measure(heartbeat)
        return heartbeat


def _measure(heartbeat: Heartbeat) -> None:
    process = (heartbeat.kind, f"{heartbeat.host}:{heartbeat.pid}")
    metrics.PROCESS_HEARTBEAT.set(time.time(), *process, ",".join(heartbeat.queues), heartbeat.version)
    metrics.PROCESS_THREADS.set(heartbeat.threads, *process)
    metrics.PROCESS_BUSY_THREADS.set(heartbeat.busy, *process)


def _call_at_exit(stop: Callable[[], None]) -> None:
    process = os.getpid()
    # A forked child has no thread that would send anything.
    atexit.register(lambda: stop() if os.getpid() == process else None)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # periodiq has no handler of its own, so SIGTERM would end it without a last heartbeat.
        atexit.register(exit_on(signal.SIGTERM))
