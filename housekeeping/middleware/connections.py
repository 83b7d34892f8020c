"""One database connection for each worker thread, sound at the start of every message."""

from __future__ import annotations

from typing import Any

from dramatiq import Broker, MessageProxy, Middleware
from dramatiq.worker import WorkerThread

from housekeeping.foundation.db import database


class Connections(Middleware):
    """Middleware that hands each message a connection without remains of the last one.

    The connection stays open from message to message (opening one costs a hundred times as much as using it). One
    that is broken, or that an actor left inside a transaction, is closed, which rolls back.
    """

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        if database.obj is None or database.is_closed():
            return
        if database.in_transaction() or not database.is_connection_usable():
            database.close()

    after_skip_message = after_process_message

    def before_worker_thread_shutdown(self, broker: Broker, thread: WorkerThread) -> None:
        if database.obj is not None and not database.is_closed():
            database.close()
