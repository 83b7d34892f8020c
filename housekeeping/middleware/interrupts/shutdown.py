"""Interrupts of actors at shutdown: after a grace period, and never outside the actor's function."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import dramatiq.middleware
from dramatiq import Actor, Broker, MessageProxy, Worker
from dramatiq.middleware import Shutdown

from housekeeping.core.telemetry.context import current_message
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.thread_interrupt import interrupt, run_interruptibly
from housekeeping.middleware.interrupts.statements import StatementInProgress, statement_of_this_thread

logger = named_logger(__name__)

DEFAULT_GRACE: Final = timedelta(seconds=30)  # promise R5


@dataclass(slots=True)
class _Inside:
    """A thread inside an actor's function."""

    thread_id: int
    at_once: bool
    statement: StatementInProgress | None
    left: bool = False
    canceled: bool = False
    #: Held while its statement is canceled, so that no later statement is hit.
    cancelling: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """Cancel the statement that the actor waits for, unless the thread has left the actor."""
        with self.cancelling:
            if not self.left and self.statement is not None and self.statement.cancel():
                self.canceled = True


class ShutdownNotifications(dramatiq.middleware.ShutdownNotifications):
    """Dramatiq's middleware with a grace period for actors that do not ask for an immediate notification.

    An actor with ``notify_shutdown=True`` is interrupted at once by ``Shutdown``, any other actor after the grace
    period. An interrupted message goes back to the queue without using up a retry. At the end of the grace period, the
    statement that an interrupted actor waits for on the library's database connection is canceled, too.

    Note: Otherwise an interrupt waits for a call into C to return: a sleep, a wait for another program or server, a
      statement on the application's own connection, a ``COMMIT``.

    Dramatiq's own can interrupt a thread that has left its actor and is acknowledging or requeueing the message, which
    is then lost. Here only the actor's function is interrupted.
    """

    def __init__(self, grace: timedelta = DEFAULT_GRACE, notify_shutdown: bool = False) -> None:
        super().__init__(notify_shutdown=notify_shutdown)
        self._grace = grace
        self._lock = threading.Lock()
        self._at_once = threading.local()
        self._inside: dict[int, _Inside] = {}
        self._timer: threading.Timer | None = None
        self._stopping = False

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        actor.fn = self._interruptible(actor.fn)

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        self._stopping = False

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self._stopping = True
        self._interrupt(lambda inside: inside.at_once)
        self._timer = threading.Timer(self._grace.total_seconds(), self._end_of_grace)
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
        """Do nothing: no interrupt arrives once the thread has left its actor."""

    after_skip_message = after_process_message

    def _end_of_grace(self) -> None:
        # All are interrupted first, so that an interrupt is pending when a statement ends.
        for inside in self._interrupt(lambda inside: True):
            # One thread each, because a server may not answer.
            threading.Thread(target=inside.cancel, daemon=True).start()

    def _interrupt(self, chosen: Callable[[_Inside], bool]) -> list[_Inside]:
        with self._lock:
            within = [inside for inside in self._inside.values() if chosen(inside) and not inside.left]
            for inside in within:
                if interrupt(inside.thread_id, Shutdown):
                    logger.warning("Actor interrupted by the shutdown of its process", thread_id=inside.thread_id)
        return within

    def _is_within(self, thread_id: int) -> bool:
        inside = self._inside.get(thread_id)
        return inside is not None and not inside.left

    def _interruptible(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if current_message.get() is None or self._is_within(threading.get_ident()):
                return function(*args, **kwargs)  # called directly, or by another actor
            at_once = getattr(self._at_once, "wanted", False)
            inside = _Inside(threading.get_ident(), at_once, statement_of_this_thread())
            return run_interruptibly(self._run, inside, lambda: function(*args, **kwargs))

        return run

    def _run(self, inside: _Inside, function: Callable[[], Any]) -> Any:
        try:
            with self._lock:
                self._inside[inside.thread_id] = inside
            if self._stopping and inside.at_once:
                raise Shutdown  # the shutdown began before the actor
            return function()
        except Exception as error:
            with inside.cancelling:
                canceled = inside.canceled
            if canceled:
                raise Shutdown from error  # the error is the canceled statement's, not the actor's
            raise
        finally:
            inside.left = True  # no call before this: where one returns, an interrupt may arrive
            with inside.cancelling, self._lock:
                self._inside.pop(inside.thread_id, None)
