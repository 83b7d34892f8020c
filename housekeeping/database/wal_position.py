"""How far the primary had written its log when a message was sent: what a replica must have replayed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Self

import psycopg2
from peewee import PeeweeException

from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.connection import Database, connect_to, database

logger = named_logger(__name__)

#: A server that failed is not asked again, and nothing is said of it, for so long.
RETRY_AFTER: Final = timedelta(minutes=1)
#: A sender must not wait for a position as long as a run would wait for its batch.
_PATIENCE: Final = {"connect_timeout": "2", "tcp_user_timeout": "5000"}
_STATEMENT: Final = "-c statement_timeout=2s"
#: Inserted, not only flushed: it covers a commit that did not wait for the disk (synchronous_commit = off).
#: The name of the log's file begins with the timeline, which no other function tells without delay after a failover.
_ASK: Final = (
    "SELECT system_identifier::text, pg_walfile_name(lsn), lsn::text "
    "FROM pg_control_system(), pg_current_wal_insert_lsn() AS lsn"
)


@dataclass(frozen=True, slots=True, order=True)
class WalPosition:
    """A place in the log of one PostgreSQL; the later one is the greater.

    Attributes:
      system: Which cluster, by its system identifier.
      timeline: Which of its timelines; each promotion begins one.
      lsn: The byte in the log.
    """

    system: str
    timeline: int
    lsn: int

    @classmethod
    def parse(cls, text: object) -> Self | None:
        """The position that `text` is; None when it is none."""
        try:
            system, timeline, lsn = str(text).split("/")
            return cls(system, int(timeline, 16), int(lsn, 16))
        except ValueError:
            return None

    def __str__(self) -> str:
        # Of a fixed width, so that Redis can tell the later one too, by comparing texts.
        return f"{self.system}/{self.timeline:08X}/{self.lsn:016X}"

    @property
    def as_lsn(self) -> str:
        """The place in the log as PostgreSQL writes it."""
        return f"{self.lsn >> 32:X}/{self.lsn & 0xFFFFFFFF:X}"


class WalPositionReader:
    """Asks the primary where its log is, by one connection for the whole process.

    Parameters:
      url: The primary's; null: there is no database, so no position.
      clock: Seconds that go by.
    """

    def __init__(self, url: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._lock = threading.Lock()
        self._connected: tuple[int, Database] | None = None
        self._asked_from = 0.0

    def current(self) -> WalPosition | None:
        """Where the log is now; None when nobody can tell, and then the message is to read from the primary.

        Within a transaction of the library's own database handle nobody can: what it writes comes later in the log.
        """
        if self._url is None or (database.obj is not None and database.in_transaction()):
            return None
        with self._lock:
            if self._clock() < self._asked_from:
                return None
            try:
                [(system, file, lsn)] = self._database(self._url).execute_sql(_ASK).fetchall()
            except (PeeweeException, psycopg2.Error) as error:
                self._asked_from = self._clock() + RETRY_AFTER.total_seconds()
                logger.warning(
                    "Messages are sent without a position, and read from the primary", error=error_line(error)
                )
                return None
        high, _, low = lsn.partition("/")
        return WalPosition(system, int(file[:8], 16), int(high, 16) << 32 | int(low, 16))

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        with self._lock:
            if self._connected is not None:
                self._connected[1].close()
                self._connected = None

    def _database(self, url: str) -> Database:
        # A connection that came over a fork is its parent's.
        if self._connected is None or self._connected[0] != os.getpid():
            of_thread = connect_to(url)
            given = dict(of_thread.connect_params) | _PATIENCE
            given["options"] = f"{given['options']} {_STATEMENT}"
            self._connected = os.getpid(), Database(of_thread.database, thread_safe=False, **given)
        return self._connected[1]
