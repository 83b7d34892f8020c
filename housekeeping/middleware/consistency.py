"""Data consistency: a message reads from a replica that has caught up with its sender, or from the primary.

The position in the primary's write-ahead log (WAL) is read when a message is sent, and the message carries it. At its
first read, a replica is chosen that has replayed this position. `read_database` returns the database to read from.
Worker threads have one database connection each, clean at the start of every message.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar

import psycopg2
import redis
from dramatiq import Broker, Message, MessageProxy, Middleware
from dramatiq.common import current_millis
from peewee import InterfaceError, OperationalError, PeeweeException
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from housekeeping.brokers.dramatiq_internals import Requeue
from housekeeping.core.errors import RedisUnavailable, SettingsError
from housekeeping.core.logs import error_line, mask_secrets
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.redis import text, translate_redis_errors
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry import MessageContext, current_message, waiting_for
from housekeeping.database.connection import Database, PreparedStatements, connect_to, database
from housekeeping.database.errors import is_timeout
from housekeeping.middleware.keys import KEY, POSITION, POSITION_REMEMBERED, position_prefix


class Connections(Middleware):
    """Middleware that gives each message a connection without leftovers of the last message.

    A thread keeps its connection from message to message, because opening one costs a hundred times as much as using
    it. A connection that is broken, or that an actor left inside a transaction, is closed, which rolls back.
    """

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        for each in database.by_name().values():
            _close_if_unusable(each)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self.after_process_message(broker, message)


def _close_if_unusable(used: Database) -> None:
    """Close this thread's connection if it is broken or inside a transaction."""
    if used.is_closed():
        return
    # The status also shows a transaction that peewee did not begin, and a dead server.
    if used.in_transaction() or used.connection().info.transaction_status != TRANSACTION_STATUS_IDLE:
        while used.in_transaction():  # peewee does not close a connection inside a transaction
            used.pop_transaction()
        used.close()


logger = named_logger(__name__)

#: A message older than this reads from the primary. The positions of its dropped duplicates expire soon after, and the
#: clocks of two hosts may differ.
_OLDEST: Final = POSITION_REMEMBERED / 2
#: Delay of a `delayed` message that is requeued, once: a replica that did not catch up in half a second is busy.
_LATER: Final = timedelta(seconds=5)
#: The message option of a message that was requeued for a replica.
_WAITED: Final = "waited_for_replica"


class _ThreadState(threading.local):
    many = False
    shared: WalPosition | None = None  # the position of all messages in `sending_many`


class DataConsistency(Middleware):
    """Middleware that lets messages of actors that opt in read from replicas.

    ::

        @dramatiq.actor(data_consistency="sticky")
        def remind(user_id: int) -> None:
            unread = Notification.select().where(Notification.user_id == user_id).count(housekeeping.read_database())

    A message of a ``sticky`` or ``delayed`` actor carries the position of the primary's log at the time it was sent. If
    duplicates of it were dropped, the newest position counts. A ``delayed`` message is requeued once, before it starts,
    if all replicas lag.

    Parameters:
      client, namespace: Of the Redis in which deduplication remembers the positions of dropped duplicates.
      positions: Reads the positions that messages carry, which are those of the database ``main``.
      replicas: Replicas of ``main``.
      others: Replicas of the other databases by name. They must have replayed the position at the time of the message's
        first read, which is later than the sender's.
    """

    def __init__(
        self,
        client: redis.Redis,
        namespace: str,
        positions: WalPositionReader,
        replicas: Replicas,
        others: Mapping[str, tuple[WalPositionReader, Replicas]] = MappingProxyType({}),
    ) -> None:
        self._client = client
        self._prefix = position_prefix(namespace)
        self._positions = positions
        self._replicas = replicas
        self._others = others
        self._has_replicas = bool(replicas or others)
        self._thread = _ThreadState()

    @contextmanager
    def sending_many(self) -> Iterator[None]:
        """Query one position for all messages that this thread sends in the block.

        Commit nothing in the block that its messages must see.
        """
        if self._thread.many:
            yield
            return
        self._thread.many = True
        try:
            yield
        finally:
            self._thread.many, self._thread.shared = False, None

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        # A message that goes back into the queue keeps its position, which covers what its sender saw.
        if not self._asked_for(broker, message) or not self._replicas or POSITION in message.options:
            return
        position = self._thread.shared or self._positions.current()
        if position is not None:
            message.options[POSITION] = str(position)
        if self._thread.many:
            self._thread.shared = position

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        if not self._asked_for(broker, message):
            return
        delayed = broker.get_actor(message.actor_name).options["data_consistency"] == "delayed"
        if delayed and self._replicas and _WAITED not in message.options and self._caught_up(message).lagging:
            message.options[_WAITED] = True
            logger.info("Message requeued, because all replicas lag", job_status="waits_for_replica")
            raise Requeue(f"{message.message_id} waits for a replica", _LATER)
        # The replica is chosen at the first read: most runs need none, and until its run starts a message may still
        # replace duplicates, whose positions count.
        context = current_message.get()
        routings = [ReadRouting(context, partial(self._replica_of, name), name) for name in self._others]
        if self._replicas:
            routings.append(ReadRouting(context, lambda: self._caught_up(message).replica))
        _routing.set({each.name: each for each in routings})

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._replicas.close_unusable()
        for _, replicas in self._others.values():
            replicas.close_unusable()

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self.after_process_message(broker, message)

    def _asked_for(self, broker: Broker, message: Message[Any] | MessageProxy) -> bool:
        actor = broker.actors.get(message.actor_name) if self._has_replicas else None
        return actor is not None and actor.options.get("data_consistency") in ("sticky", "delayed")

    def _replica_of(self, name: str) -> Replica | None:
        """Find a replica of another database that has replayed the current position."""
        positions, replicas = self._others[name]
        position = positions.current()
        return None if position is None else replicas.caught_up(position, _pause()).replica

    def _caught_up(self, message: MessageProxy) -> ReplicaChoice:
        """Find a replica that has caught up with the message."""
        position = self._position(message)
        if position is None:
            return ReplicaChoice(None, lagging=False)
        return self._replicas.caught_up(position, _pause())

    def _position(self, message: MessageProxy) -> WalPosition | None:
        """Return the newest position of the message and its dropped duplicates; None if unknown."""
        age = timedelta(milliseconds=current_millis() - message.message_timestamp)
        own, key = WalPosition.parse(message.options.get(POSITION)), message.options.get(KEY)
        if own is None or age > _OLDEST:
            return None
        if key is None:
            return own
        try:
            with translate_redis_errors():
                answer: Any = self._client.get(self._prefix + key)
        except RedisUnavailable as error:
            logger.warning("Message reads from the primary", error=str(error))
            return None
        of_duplicates = WalPosition.parse(text(answer))
        return own if of_duplicates is None else max(own, of_duplicates)


def _pause() -> Callable[[float], object]:
    """Return a function that waits, for a shorter time when the process is asked to stop."""
    context = current_message.get()
    return context.stopping.wait if context else time.sleep


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
    routing = _routing.get().get(name)
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


#: Time for which a server is not used after a failure, and no further warning is logged.
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
        routing = _routing.get().get(self._primary)
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
            _close_if_unusable(replica)
