"""One database connection for each worker thread, sound at the start of every message."""

from __future__ import annotations

from typing import Any

from dramatiq import Broker, MessageProxy, Middleware
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from housekeeping.database.connection import database


class Connections(Middleware):
    """Middleware that hands each message a connection without remains of the last one.

    The connection stays open from message to message (opening one costs a hundred times as much as using it). One
    that is broken, or that an actor left inside a transaction, is closed, which rolls back. It ends with its thread.
    """

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        if database.obj is None or database.is_closed():
            return
        # The status tells of a transaction begun by hand too, which peewee does not know of, and of a dead server.
        if database.in_transaction() or database.connection().info.transaction_status != TRANSACTION_STATUS_IDLE:
            _close()

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self.after_process_message(broker, message)


def _close() -> None:
    while database.in_transaction():  # peewee refuses to close a connection that it knows to be in one
        database.pop_transaction()
    database.close()
