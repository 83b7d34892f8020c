"""Cancels the statement that another thread waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import psycopg2
from psycopg2.extensions import TRANSACTION_STATUS_ACTIVE

from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.connection import database

logger = named_logger(__name__)

#: Only what runs at this moment, and never a COMMIT: a cancelled wait for a standby is no rollback.
_CANCEL: Final = """
SELECT pg_cancel_backend(pid) FROM pg_stat_activity
WHERE pid = %s AND usename = current_user AND state = 'active' AND query !~* '^\\s*(commit|end)'
"""


class StatementInProgress:
    """Whatever one thread has under way on the library's database handle, as another thread may ask for it.

    Parameters:
      connection: Tells the psycopg2 connection that the thread has open now; null when it has none.
    """

    def __init__(self, connection: Callable[[], Any]) -> None:
        self._connection = connection

    def cancel(self) -> bool:
        """Cancel it; False when nothing was under way, or the server was not to be reached. Never raises.

        By a connection of its own: psycopg2's `cancel` stops every thread of the process until the server
        answers, and knows nothing of a COMMIT.
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
            cursor.execute(_CANCEL, [connection.info.backend_pid])
            found = cursor.fetchone()
        asking.commit()
    finally:
        asking.close()
    return bool(found and found[0])


def statement_of_this_thread() -> StatementInProgress | None:
    """What this thread has under way, from now on; None without a database.

    Peewee keeps a connection for each thread in a `threading.local`, whose attributes no other thread sees; the
    dictionary behind them can be handed on.
    """
    if database.obj is None:
        return None
    own = vars(database.obj._state)
    return StatementInProgress(lambda: own.get("conn"))
