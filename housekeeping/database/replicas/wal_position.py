"""Position in the primary's write-ahead log (WAL) when a message is sent, which a replica must have replayed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self

import psycopg2
from peewee import PeeweeException

from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.connection import Database, connect_to, database
from housekeeping.database.pooler import PreparedStatements

logger = named_logger(__name__)

#: After a failure, a server is not asked again for this time, and no further warning is logged.
RETRY_AFTER: Final = timedelta(minutes=1)
#: A sender must not wait as long for a position as a run may wait for its batch.
_TIMEOUTS: Final = {"connect_timeout": "2", "tcp_user_timeout": "5000"}
_STATEMENT_TIMEOUT: Final = "-c statement_timeout=2s"
#: The insert position, not the flushed one: it includes commits that did not wait for the disk (synchronous_commit =
#: off). The name of the WAL file begins with the timeline, and only this function shows a new one at once after a
#: failover.
_CURRENT_POSITION: Final = (
    "SELECT system_identifier::text, pg_walfile_name(lsn), lsn::text "
    "FROM pg_control_system(), pg_current_wal_insert_lsn() AS lsn"
)


@dataclass(frozen=True, slots=True, order=True)
class WalPosition:
    """Position in the WAL of one PostgreSQL cluster; the later of two is greater.

    Attributes:
      system: System identifier of the cluster.
      timeline: Timeline of the cluster; each promotion starts a new one.
      lsn: Byte position.
    """

    system: str
    timeline: int
    lsn: int

    @classmethod
    def parse(cls, text: object) -> Self | None:
        """Parse a position; return None if the text is not one."""
        try:
            system, timeline, lsn = str(text).split("/")
            return cls(system, int(timeline, 16), int(lsn, 16))
        except ValueError:
            return None

    def __str__(self) -> str:
        # Of fixed width, so that Redis finds the later one by comparing texts.
        return f"{self.system}/{self.timeline:08X}/{self.lsn:016X}"

    @property
    def as_lsn(self) -> str:
        """The byte position as PostgreSQL writes it."""
        return f"{self.lsn >> 32:X}/{self.lsn & 0xFFFFFFFF:X}"


class WalPositionReader:
    """Reads the primary's WAL position, on one connection for the whole process.

    Parameters:
      url: URL of the primary; None without a database, and then there are no positions.
      clock: Monotonic clock.
      prepared_statements: As in `connect_to`.
    """

    def __init__(
        self,
        url: str | None,
        clock: Callable[[], float] = time.monotonic,
        prepared_statements: PreparedStatements = "auto",
    ) -> None:
        self._url = url
        self._prepared_statements = prepared_statements
        self._clock = clock
        self._lock = threading.Lock()
        self._connected: tuple[int, Database] | None = None
        self._retry_at = 0.0

    def current(self) -> WalPosition | None:
        """Return the current position, or None if it is unknown; the message then reads from the primary.

        It is unknown within a transaction of the library's database handle, whose writes get a later position.
        """
        if self._url is None or (database.obj is not None and database.in_transaction()):
            return None
        with self._lock:
            if self._clock() < self._retry_at:
                return None
            try:
                [(system, file, lsn)] = self._database(self._url).execute_sql(_CURRENT_POSITION).fetchall()
            except (PeeweeException, psycopg2.Error) as error:
                self._retry_at = self._clock() + RETRY_AFTER.total_seconds()
                logger.warning("Messages are sent without a position", error=error_line(error))
                return None
        high, _, low = lsn.partition("/")
        return WalPosition(system, int(file[:8], 16), int(high, 16) << 32 | int(low, 16))

    def close(self) -> None:
        """Close the connection; the next call of `current` opens another."""
        with self._lock:
            if self._connected is not None:
                self._connected[1].close()
                self._connected = None

    def _database(self, url: str) -> Database:
        # A connection inherited by a fork belongs to the parent.
        if self._connected is None or self._connected[0] != os.getpid():
            template = connect_to(url)
            parameters: dict[str, Any] = dict(template.connect_params) | _TIMEOUTS
            parameters["prepared_statements"] = self._prepared_statements
            parameters["options"] = f"{parameters['options']} {_STATEMENT_TIMEOUT}"
            self._connected = os.getpid(), Database(template.database, thread_safe=False, **parameters)
        return self._connected[1]
