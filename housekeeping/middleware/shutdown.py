"""Ends actors when their process is told to stop: after a time of grace, and never outside of the actor."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import dramatiq.middleware
from dramatiq import Actor, Broker, MessageProxy, Worker
from dramatiq.middleware import Shutdown, raise_thread_exception

from housekeeping.foundation.context import current_message
from housekeeping.foundation.logs import logger as named_logger

logger = named_logger(__name__)

DEFAULT_GRACE: Final = timedelta(seconds=30)  # semantics.md, R5


class ShutdownNotifications(dramatiq.middleware.ShutdownNotifications):
    """Dramatiq's own, with a time of grace for actors that did not ask to be told at once.

    ``@dramatiq.actor(notify_shutdown=True)`` is interrupted at once by ``Shutdown``; any other when the
    grace is over. An interrupted message goes back to the queue without using up a retry.

    Note: An interrupt waits for a call into C to return: a statement, a sleep, a wait for another program.

    Dramatiq's own can interrupt a thread that has left its actor and is acknowledging or putting back
    the message, which is then lost. Here, only the actor's own function is ever interrupted.
    """

    def __init__(self, grace: timedelta = DEFAULT_GRACE, notify_shutdown: bool = False) -> None:
        super().__init__(notify_shutdown=notify_shutdown)
        self._grace = grace
        self._lock = threading.Lock()
        self._at_once = threading.local()
        self._inside: dict[int, bool] = {}  # threads inside of an actor, and whether they are told at once
        self._timer: threading.Timer | None = None
        self._stopping = False

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        actor.fn = self._interruptible(actor.fn)

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        self._stopping = False

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self._stopping = True
        self._interrupt(lambda at_once: at_once)
        self._timer = threading.Timer(self._grace.total_seconds(), self._interrupt, [lambda at_once: True])
        self._timer.daemon = True
        self._timer.start()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        self._at_once.wanted = self.should_notify(broker.get_actor(message.actor_name), message)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Nothing to do: the thread was out of danger when it left its actor."""

    after_skip_message = after_process_message

    def _interrupt(self, concerned: Callable[[bool], bool]) -> None:
        with self._lock:
            for thread_id, at_once in list(self._inside.items()):
                if concerned(at_once):
                    del self._inside[thread_id]  # once is enough; a second one could come late
                    logger.warning("Actor is interrupted for the shutdown of its process", thread_id=thread_id)
                    raise_thread_exception(thread_id, Shutdown)

    def _interruptible(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if current_message.get() is None:
                return function(*args, **kwargs)  # called as a plain function, not by a worker
            thread_id = threading.get_ident()
            try:
                with self._lock:
                    self._inside[thread_id] = getattr(self._at_once, "wanted", False)
                if self._stopping and self._inside[thread_id]:
                    raise Shutdown  # told before it had begun
                return function(*args, **kwargs)
            finally:
                with self._lock:
                    self._inside.pop(thread_id, None)
                # An interrupt on its way to this thread must not arrive in the hooks that follow.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), None)

        return run
