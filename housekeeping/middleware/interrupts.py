"""Interrupts of actors: by the shutdown of their process, or by their time limit, never outside the actor's function.

The SQL statement that an interrupted actor waits for is canceled. The part of Dramatiq's `TimeLimit` that raises
exceptions in threads is replaced. Everything uses `core.interrupts`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, TypeVar

import dramatiq.middleware
import psycopg2
from dramatiq import Actor, Broker, MessageProxy, Worker
from dramatiq.middleware import Interrupt, Shutdown, TimeLimit
from dramatiq.middleware.time_limit import TimeLimitExceeded
from psycopg2.extensions import TRANSACTION_STATUS_ACTIVE

from housekeeping.brokers.dramatiq_internals import replace_manager
from housekeeping.core.interrupts import interrupt, run_interruptibly
from housekeeping.core.logs import error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.telemetry import current_message
from housekeeping.database.connection import database

logger = named_logger(__name__)

#: Cancels only a running statement, and never a COMMIT: canceling its wait for a standby does not roll back. Through a
#: pooler, only the transaction's name shows which server process executes it.
_CANCEL: Final = """
SELECT pg_cancel_backend(pid) FROM pg_stat_activity
WHERE CASE WHEN %(name)s = '' THEN pid = %(pid)s ELSE application_name = %(name)s END
    AND usename = current_user AND state = 'active' AND query !~* '^\\s*(commit|end)'
"""


class StatementInProgress:
    """The statement that a thread is executing, for use by another thread.

    Parameters:
      connection: Returns the psycopg2 connection that the thread has open; None if it has none.
    """

    def __init__(self, connection: Callable[[], Any]) -> None:
        self._connection = connection

    def cancel(self) -> bool:
        """Cancel the statement; returns False if there is none or the server does not answer. Never raises.

        This opens another connection, because psycopg2's `cancel` blocks every thread of the process until the server
        answers, and also cancels a COMMIT.
        """
        connection = self._connection()
        if connection is None or connection.closed:
            return False
        if connection.info.transaction_status != TRANSACTION_STATUS_ACTIVE:
            return False
        try:
            return _cancel(connection)
        except psycopg2.Error as error:
            logger.warning("Statement could not be canceled", error=error_line(error))
            return False


def _cancel(connection: Any) -> bool:
    given = {**connection.info.dsn_parameters, "password": connection.info.password}
    asking = psycopg2.connect(**given)
    try:
        with asking.cursor() as cursor:
            cursor.execute(_CANCEL, {"pid": connection.info.backend_pid, "name": connection.transaction_name})
            found = cursor.fetchone()
        asking.commit()
    finally:
        asking.close()
    return bool(found and found[0])


def statement_of_this_thread() -> StatementInProgress | None:
    """Return the statement in progress of this thread, from now on; None without a database.

    peewee keeps each thread's connection in a `threading.local`, whose attributes other threads cannot see. The
    dictionary behind the attributes can be shared.
    """
    states = [vars(each._state) for each in database.by_name().values()]
    return StatementInProgress(lambda: _active(states)) if states else None


def _active(states: list[dict[str, Any]]) -> Any:
    """Return the connection that executes a statement, or else any open one."""
    connections = [state["conn"] for state in states if state.get("conn") is not None]
    active = (
        each for each in connections if not each.closed and each.info.transaction_status == TRANSACTION_STATUS_ACTIVE
    )
    return next(active, connections[0] if connections else None)


DEFAULT_GRACE: Final = timedelta(seconds=30)  # promise R5


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Inside:
    """The thread that makes it, inside a function in which other threads may interrupt it.

    Attributes:
      at_once: Whether the shutdown of the process interrupts it without a grace period.
      canceled_by: The interrupt that its statement was canceled for.
      cancelling: Held while its statement is canceled, so that no later statement is hit.
    """

    at_once: bool = False
    thread_id: int = field(default_factory=threading.get_ident)
    statement: StatementInProgress | None = field(default_factory=statement_of_this_thread)
    left: bool = False
    canceled_by: type[Interrupt] | None = None
    cancelling: threading.Lock = field(default_factory=threading.Lock)

    def call(self, function: Callable[[], T]) -> T:
        """Call the function within `run_interruptibly`. The error of a canceled statement becomes the interrupt."""
        try:
            return function()
        except Exception as error:
            with self.cancelling:
                canceled_by = self.canceled_by
            if canceled_by is not None:
                raise canceled_by from error
            raise
        finally:
            self.left = True  # no call before this: where one returns, an interrupt may arrive

    def cancel(self, kind: type[Interrupt]) -> None:
        """Cancel the statement that the function waits for, unless the thread has left the function."""
        with self.cancelling:
            if not self.left and self.statement is not None and self.statement.cancel():
                self.canceled_by = kind


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
        self._inside: dict[int, Inside] = {}
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
            threading.Thread(target=inside.cancel, args=(Shutdown,), daemon=True).start()

    def _interrupt(self, chosen: Callable[[Inside], bool]) -> list[Inside]:
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
            inside = Inside(getattr(self._at_once, "wanted", False))
            return run_interruptibly(self._run, inside, lambda: function(*args, **kwargs))

        return run

    def _run(self, inside: Inside, function: Callable[[], Any]) -> Any:
        try:
            with self._lock:
                self._inside[inside.thread_id] = inside
            if self._stopping and inside.at_once:
                raise Shutdown  # the shutdown began before the actor
            return inside.call(function)
        finally:
            inside.left = True  # also if an interrupt arrived before the call
            with inside.cancelling, self._lock:
                self._inside.pop(inside.thread_id, None)


def within_actors(limits: TimeLimit) -> TimeLimit:
    """Make a `TimeLimit`, Dramatiq's own or an application's, interrupt only inside actors.

    Dramatiq's raises `TimeLimitExceeded` wherever the thread is. After the actor, while the message is acknowledged, it
    ends the thread and leaves the message unacknowledged. While the thread holds the lock of a log handler, it leaves
    the lock held, and all other threads wait forever. Limits, options and the interval stay as they are.
    """
    replace_manager(limits, _Deadlines)
    return limits


class _Deadlines:
    """Deadlines of threads, in place of Dramatiq's manager.

    Parameters:
      interval_s: Time between checks.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}

    def start(self) -> None:
        threading.Thread(target=self._run, name="housekeeping-time-limits", daemon=True).start()

    def add_timeout(self, thread_id: int, ttl: float) -> None:
        deadline = time.monotonic() + ttl / 1000
        with self._lock:
            self._deadlines[thread_id] = deadline

    def remove_timeout(self, thread_id: int) -> None:
        with self._lock:
            self._deadlines.pop(thread_id, None)

    def interrupt_late(self) -> None:
        """Interrupt every thread that is past its deadline, once."""
        now = time.monotonic()
        # Under the lock, so that no thread starts its next message meanwhile and is interrupted for the last one.
        with self._lock:
            late = [thread_id for thread_id, deadline in self._deadlines.items() if deadline <= now]
            interrupted = [thread_id for thread_id in late if interrupt(thread_id, TimeLimitExceeded)]
            for thread_id in late:
                del self._deadlines[thread_id]
        for thread_id in interrupted:
            logger.warning("Actor interrupted at its time limit", thread_id=thread_id)

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_s)
            try:
                self.interrupt_late()
            except Exception:
                logger.exception("Time limits could not be checked")
