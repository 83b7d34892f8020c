"""Cancellation of the SQL statement that another thread waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import psycopg2
from psycopg2.extensions import TRANSACTION_STATUS_ACTIVE

from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.logs import logger as named_logger
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
