"""Database connections of worker threads: one per thread, clean at the start of every message."""

from __future__ import annotations

from typing import Any

from dramatiq import Broker, MessageProxy, Middleware
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from housekeeping.database.connection import Database, database


class Connections(Middleware):
    """Middleware that gives each message a connection without leftovers of the last message.

    A thread keeps its connection from message to message, because opening one costs a hundred times as much as using
    it. A connection that is broken, or that an actor left inside a transaction, is closed, which rolls back.
    """

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        for each in database.by_name().values():
            if each.is_closed():
                continue
            # The status also shows a transaction that peewee did not begin, and a dead server.
            if each.in_transaction() or each.connection().info.transaction_status != TRANSACTION_STATUS_IDLE:
                _close(each)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self.after_process_message(broker, message)


def _close(unusable: Database) -> None:
    while unusable.in_transaction():  # peewee does not close a connection inside a transaction
        unusable.pop_transaction()
    unusable.close()
