"""Reads from replicas: a message reads only from one that has replayed the WAL position that it carries.

The position in the primary's write-ahead log (WAL) is read when a message is sent. `read_database` is the public server
to read from: the primary, or the replica that was chosen for the message.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar

import psycopg2
from peewee import InterfaceError, OperationalError, PeeweeException
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from housekeeping.core.errors import SettingsError
from housekeeping.core.logs import error_line, mask_secrets
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry import MessageContext, current_message, waiting_for
from housekeeping.database.connection import Database, PreparedStatements, connect_to, database
from housekeeping.database.errors import is_timeout

#: Server that a message has read from.
ReadSource = Literal["primary", "replica"]


class ReadRouting:
    """Server that the current message reads one database from, chosen at its first read and kept until it ends.

    Parameters:
      message: The message.
      choose: Returns a replica, or None for the primary.
      name: Name of the database.
    """

    def __init__(self, message: MessageContext | None, choose: Callable[[], Replica | None], name: str = MAIN) -> None:
        self.message = message
        self.name = name
        self.used: ReadSource = "primary"
        self._choose = choose
        self._chosen: list[Replica | None] = []

    def database(self) -> Database:
        """Return the database of the chosen replica, or of the primary."""
        if not self._chosen:
            self._chosen.append(self._choose())
        return self._chosen[0] or primary_named(self.name)

    def uses(self, replica: Replica) -> bool:
        """Return whether the message reads from this replica and has not ended."""
        return self.message is current_message.get() and self._chosen[:1] == [replica]

    def use_primary(self) -> None:
        """Read from the primary until the message ends."""
        self._chosen = [None]


_NOWHERE: Final[dict[str, ReadRouting]] = {}
_routing: Final[ContextVar[dict[str, ReadRouting]]] = ContextVar("read_routing", default=_NOWHERE)


def routing_of(name: str) -> ReadRouting | None:
    """Return where the current message reads the database; None: not chosen for any message."""
    return _routing.get().get(name)


def set_read_routing(*routings: ReadRouting) -> None:
    """Set where the current message reads each database; other databases are read from their primaries."""
    _routing.set({each.name: each for each in routings})


def read_database(name: str = MAIN) -> Database:
    """Return the database that the current message may read from: a replica if its ``data_consistency`` allows one.

    ::

        @dramatiq.actor(data_consistency="sticky")
        def remind(user_id: int) -> None:
            unread = Notification.select().where(Notification.user_id == user_id).count(housekeeping.read_database())

    Parameters:
      name: Name of the database, from ``HOUSEKEEPING_DATABASES``.

    A replica is used if it has replayed what was committed before the message was sent. ``sticky`` waits up to half a
    second for one, and ``delayed`` tries once more some seconds later. If the replica fails, its statements run on the
    primary. Outside of a message, within a transaction of the library's database handle, and for all other actors the
    result is the primary.

    Note: A replica may lack what the message itself has written; read that from the primary. A replica is read-only.
      Select and lock rows that you change on the primary.

    Raises:
      SettingsError: If there is no such database, or ``HOUSEKEEPING_DATABASE_URL`` is not set.
    """
    primary = primary_named(name)
    routing = routing_of(name)
    if primary.in_transaction() or routing is None or routing.message is not current_message.get():
        return primary
    return routing.database()


def data_consistency_used() -> ReadSource:
    """Return ``replica`` if a read of the current message went to one, else ``primary``."""
    message = current_message.get()
    replica = any(each.used == "replica" and each.message is message for each in _routing.get().values())
    return "replica" if replica else "primary"


def primary_named(name: str) -> Database:
    """Return the primary of the database with this name.

    Raises:
      SettingsError: As `read_database`.
    """
    databases = database.by_name()
    if name not in databases and name != MAIN:
        raise SettingsError(
            f"there is no database {name!r}; the databases are {', '.join(databases)} (HOUSEKEEPING_DATABASES)"
        )
    if name not in databases:
        raise SettingsError(
            "HOUSEKEEPING_DATABASE_URL is not set; it should be a URL such as postgresql://host/database"
        )
    return databases[name]


logger = named_logger(__name__)

#: After a failure, a server is not asked again for this time, and no further warning is logged.
RETRY_AFTER: Final = timedelta(minutes=1)
#: Neither a sender nor a message may wait as long for a position or a replica as a run may wait for its batch.
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


def _parameters(url: str, options: str, prepared_statements: PreparedStatements) -> dict[str, Any]:
    """Return the parameters of a `Database` that waits less for its server, with further options."""
    of_url = connect_to(url)
    given = {**of_url.connect_params, **_TIMEOUTS, "options": f"{of_url.connect_params['options']} {options}"}
    return {"database": of_url.database, "prepared_statements": prepared_statements, **given}


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
            parameters = _parameters(url, _STATEMENT_TIMEOUT, self._prepared_statements)
            self._connected = os.getpid(), Database(thread_safe=False, **parameters)
        return self._connected[1]


#: Maximum time to wait for a replica that lags. A healthy one is some milliseconds behind, or up to the 200 ms of
#: wal_writer_delay if commits do not wait for the disk. One that is further behind would not catch up in a second.
MAX_WAIT: Final = timedelta(seconds=0.5)
_POLL_S: Final = 0.02  # PostgreSQL does not notify clients of its replay position
#: A promoted replica accepts writes. This library must not write to it.
_READ_ONLY: Final = "-c default_transaction_read_only=on"
_REPLAY_STATE: Final = """SELECT CASE
WHEN NOT pg_is_in_recovery() THEN 'it is no replica'
WHEN system_identifier::text <> %s THEN 'it is a replica of another database'
WHEN min_recovery_end_timeline <> %s THEN 'it is on another timeline'
WHEN pg_last_wal_replay_lsn() >= %s::pg_lsn THEN 'caught up'
ELSE 'lags' END FROM pg_control_system(), pg_control_recovery()"""

T = TypeVar("T")


class Replica(Database):
    """Database of one replica, for the message that reads from it.

    A statement outside of transactions runs on the primary instead if the replica fails, or if the message that chose
    this replica has ended.

    Parameters:
      url: URL of the replica; it connects with its first statement.
      clock: Monotonic clock.
      prepared_statements: As in `connect_to`.
      primary: Name of the database of which it is a replica.
    """

    def __init__(
        self,
        url: str,
        clock: Callable[[], float] = time.monotonic,
        prepared_statements: PreparedStatements = "auto",
        primary: str = MAIN,
    ) -> None:
        super().__init__(**_parameters(url, _READ_ONLY, prepared_statements))
        self._url = url
        self._primary = primary
        self._clock = clock
        self._failure_lock = threading.Lock()
        self._skipped_until = 0.0

    def replay_state(self, position: WalPosition) -> Literal["caught up", "lags", "skipped"]:
        """Return whether the replica has replayed the position; one that fails is skipped for a minute."""
        if self._clock() < self._skipped_until:
            return "skipped"
        needed = (position.system, position.timeline, position.as_lsn)
        try:
            with waiting_for("database"):
                # Not by this class's methods, which may use the primary and never reconnect.
                state = super()._reconnect_if_dead(
                    lambda: super(Database, self).execute_sql(_REPLAY_STATE, needed).fetchone()[0]
                )
        except (PeeweeException, psycopg2.Error) as error:
            state = error_line(error)
        if state not in ("caught up", "lags"):
            self._skip_for_a_minute(state)
            return "skipped"
        return "lags" if state == "lags" else "caught up"

    def execute_sql(self, sql: str, params: Any = None) -> Any:
        if self.in_transaction():
            return super().execute_sql(sql, params)
        routing = routing_of(self._primary)
        if routing is None or not routing.uses(self) or self.is_closed():
            return primary_named(self._primary).execute_sql(sql, params)
        try:
            cursor = super().execute_sql(sql, params)
        except (OperationalError, InterfaceError) as error:
            if is_timeout(error):  # not repeated on the primary
                raise
            self._skip_for_a_minute(error_line(error))
            routing.use_primary()
            return primary_named(self._primary).execute_sql(sql, params)
        routing.used = "replica"
        return cursor

    def close_if_unusable(self) -> None:
        """Close this thread's connection if it is broken or inside a transaction."""
        if self.is_closed():
            return
        if self.in_transaction() or self.connection().info.transaction_status != TRANSACTION_STATUS_IDLE:
            while self.in_transaction():
                self.pop_transaction()
            self.close()

    def _reconnect_if_dead(self, step: Callable[[], T]) -> T:
        # Never reconnects: a replica that restarted may have replayed less than when it was chosen.
        return step()

    def _skip_for_a_minute(self, reason: str) -> None:
        with self._failure_lock:
            if self._clock() < self._skipped_until:
                return
            self._skipped_until = self._clock() + RETRY_AFTER.total_seconds()
        logger.warning("Replica skipped for a minute", replica=mask_secrets(self._url), reason=reason)


class ReplicaChoice(NamedTuple):
    """Result of the search for a replica.

    Attributes:
      replica: The first replica that has replayed the position, if any.
      lagging: Whether at least one replica has not replayed it yet.
    """

    replica: Replica | None
    lagging: bool


class Replicas:
    """All configured replicas, used in turn.

    Parameters:
      urls: URLs of the replicas; without any, everything is read from the primary.
      clock: Monotonic clock.
      prepared_statements: As in `connect_to`.
      primary: Name of the database of which they are replicas.
    """

    def __init__(
        self,
        urls: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        prepared_statements: PreparedStatements = "auto",
        primary: str = MAIN,
    ) -> None:
        self._all = [Replica(url, clock, prepared_statements, primary) for url in urls]
        self._turn = itertools.count()
        self._clock = clock

    def __bool__(self) -> bool:
        return bool(self._all)

    def caught_up(self, position: WalPosition, pause: Callable[[float], object]) -> ReplicaChoice:
        """Choose the first replica that has replayed the position, and wait for one for up to half a second.

        Parameters:
          pause: Waits for a number of seconds between two checks; a true result ends the wait.
        """
        first = next(self._turn) % len(self._all)
        candidates = self._all[first:] + self._all[:first]
        deadline = self._clock() + MAX_WAIT.total_seconds()
        while True:
            lagging = []
            for replica in candidates:
                state = replica.replay_state(position)
                if state == "caught up":
                    return ReplicaChoice(replica, lagging=False)
                if state == "lags":
                    lagging.append(replica)
            if not lagging or self._clock() >= deadline or pause(_POLL_S):
                return ReplicaChoice(None, bool(lagging))
            candidates = lagging

    def close_unusable(self) -> None:
        """Close this thread's connections that the next message could not use."""
        for replica in self._all:
            replica.close_if_unusable()
