"""Reads from replicas, for the message at work: only what has replayed the position that the message carries."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple, TypeVar

import psycopg2
from peewee import InterfaceError, OperationalError, PeeweeException
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from housekeeping.core.errors import SettingsError
from housekeeping.core.sanitize import error_line, mask_secrets
from housekeeping.core.telemetry.io_timing import waiting_for
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.telemetry.message_context import MessageContext, current_message
from housekeeping.database.connection import Database, connect_to, database, sqlstate
from housekeeping.database.wal_position import RETRY_AFTER, WalPosition

logger = named_logger(__name__)

#: How long to wait for a replica that lags: a healthy one is behind by some milliseconds, and by up to the 200 ms of
#: wal_writer_delay where commits do not wait for the disk. Behind by more, it will not have caught up in a second.
MAX_WAIT: Final = timedelta(seconds=0.5)
_LOOK_AGAIN_S: Final = 0.02  # PostgreSQL tells nobody how far it has replayed; one has to look
#: A promoted replica takes writes; ours must not go there.
_READ_ONLY: Final = "-c default_transaction_read_only=on"
#: Like the primary when it is asked for a position: a replica that hangs must not hold up a message for long.
_CONNECTION: Final = {"connect_timeout": "2", "tcp_user_timeout": "5000"}
#: A statement that was cancelled, by its timeout or for a shutdown, is not to be begun again elsewhere.
_CANCELLED: Final = "57014"
_LOOK: Final = """SELECT CASE
WHEN NOT pg_is_in_recovery() THEN 'it is no replica'
WHEN system_identifier::text <> %s THEN 'it is a replica of another database'
WHEN min_recovery_end_timeline <> %s THEN 'it is on another timeline'
WHEN pg_last_wal_replay_lsn() >= %s::pg_lsn THEN 'caught up'
ELSE 'lags' END FROM pg_control_system(), pg_control_recovery()"""

T = TypeVar("T")
#: Where a message's reads went.
ReadSource = Literal["primary", "replica"]


class Replica(Database):
    """A replica's database, for the message that reads from it.

    What fails because of the replica is done on the primary, outside of transactions; so is what is asked of a handle
    that was kept longer than its message.

    Parameters:
      url: The replica's; nothing is connected before the first statement.
      clock: Seconds that go by.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        given = connect_to(url)
        options = f"{given.connect_params['options']} {_READ_ONLY}"
        super().__init__(given.database, **{**given.connect_params, **_CONNECTION, "options": options})
        self._url = url
        self._clock = clock
        self._leaving = threading.Lock()
        self._left_until = 0.0

    def look(self, position: WalPosition) -> Literal["caught up", "lags", "left alone"]:
        """Whether it has replayed the position; a replica that cannot tell is left alone for a minute."""
        if self._clock() < self._left_until:
            return "left alone"
        try:
            needed = (position.system, position.timeline, position.as_lsn)
            with waiting_for("database"):
                state = super()._on_a_live_connection(lambda: self._state_for(needed))
        except (PeeweeException, psycopg2.Error) as error:
            state = error_line(error)
        if state in ("caught up", "lags"):
            return "caught up" if state == "caught up" else "lags"
        self._leave_alone(state)
        return "left alone"

    def _state_for(self, needed: tuple[str, int, str]) -> str:
        # Past our own `execute_sql`, which is for messages.
        state: str = super(Database, self).execute_sql(_LOOK, needed).fetchone()[0]
        return state

    def execute_sql(self, sql: str, params: Any = None) -> Any:
        if self.in_transaction():
            return super().execute_sql(sql, params)
        reads = _reads.get()
        if reads is None or not reads.goes_to(self) or self.is_closed():
            return _primary().execute_sql(sql, params)
        try:
            cursor = super().execute_sql(sql, params)
        except (OperationalError, InterfaceError) as error:
            if sqlstate(error) == _CANCELLED:
                raise
            self._leave_alone(error_line(error))
            reads.give_up()
            return _primary().execute_sql(sql, params)
        reads.used = "replica"
        return cursor

    def leave_nothing_open(self) -> None:
        """Close this thread's connection if it is broken, or was left inside a transaction."""
        if self.is_closed():
            return
        if self.in_transaction() or self.connection().info.transaction_status != TRANSACTION_STATUS_IDLE:
            while self.in_transaction():
                self.pop_transaction()
            self.close()

    def _on_a_live_connection(self, step: Callable[[], T]) -> T:
        # Never on a new one: a replica that comes back may know less than when it was looked at.
        return step()

    def _leave_alone(self, why: str) -> None:
        with self._leaving:
            if self._clock() < self._left_until:
                return
            self._left_until = self._clock() + RETRY_AFTER.total_seconds()
        logger.warning("A replica is not read from for a minute", replica=mask_secrets(self._url), reason=why)


class ReplicaChoice(NamedTuple):
    """What a look at all replicas found.

    Attributes:
      replica: The first that has replayed the position; null: none has.
      lagging: Whether one at least is on its way to it.
    """

    replica: Replica | None
    lagging: bool


class Replicas:
    """All replicas there are, the next message beginning with the next one.

    Parameters:
      urls: Theirs; none: everything is read from the primary.
      clock: Seconds that go by.
    """

    def __init__(self, urls: Sequence[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._all = [Replica(url, clock) for url in urls]
        self._turn = itertools.count()
        self._clock = clock

    def __bool__(self) -> bool:
        return bool(self._all)

    def caught_up(self, position: WalPosition, pause: Callable[[float], object]) -> ReplicaChoice:
        """The first that has replayed the position, waited for if need be.

        Parameters:
          pause: Waits for so many seconds between two looks; what it returns, if true, ends the waiting.
        """
        first = next(self._turn) % len(self._all)
        asked = self._all[first:] + self._all[:first]
        deadline = self._clock() + MAX_WAIT.total_seconds()
        while True:
            lagging = []
            for replica in asked:
                state = replica.look(position)
                if state == "caught up":
                    return ReplicaChoice(replica, lagging=False)
                if state == "lags":
                    lagging.append(replica)
            if not lagging or self._clock() >= deadline or pause(_LOOK_AGAIN_S):
                return ReplicaChoice(None, bool(lagging))
            asked = lagging

    def leave_nothing_open(self) -> None:
        """Close this thread's connections that the next message could not use."""
        for replica in self._all:
            replica.leave_nothing_open()


class ReadRouting:
    """Where the message at work reads: found out when it first asks, the same until it ends.

    Parameters:
      message: Whose they are.
      choose: Finds a replica; None: the primary.
    """

    def __init__(self, message: MessageContext | None, choose: Callable[[], Replica | None]) -> None:
        self.message = message
        self.used: ReadSource = "primary"
        self._choose = choose
        self._chosen: list[Replica | None] = []

    def database(self) -> Database:
        """The replica's handle, or the primary's."""
        if not self._chosen:
            self._chosen.append(self._choose())
        return self._chosen[0] or _primary()

    def goes_to(self, replica: Replica) -> bool:
        """Whether this message, still at work, reads from this replica."""
        return self.message is current_message.get() and self._chosen[:1] == [replica]

    def give_up(self) -> None:
        """Read from the primary from now on."""
        self._chosen = [None]


_reads: Final[ContextVar[ReadRouting | None]] = ContextVar("reads", default=None)


def set_read_routing(reads: ReadRouting | None) -> None:
    """Set where the message at work reads; None: from the primary."""
    _reads.set(reads)


def read_database() -> Database:
    """The database that the message at work may read from: a replica where its ``data_consistency`` allows one.

    ::

        @dramatiq.actor(data_consistency="sticky")
        def remind(user_id: int) -> None:
            unread = Notification.select().where(Notification.user_id == user_id).count(housekeeping.read_database())

    A replica is taken when it has replayed what was committed before the message was sent (``sticky``: waited for
    for half a second; ``delayed``: once more some seconds later), and when it fails its statements are done on the
    primary. Outside of a message, within a transaction of the library's database handle, and for any other actor it
    is the primary.

    Note: It does not know what the message itself has written: read that from the primary. Nothing can be written to
      it, and rows that are to be changed are picked and locked on the primary.

    Raises:
      SettingsError: When ``HOUSEKEEPING_DATABASE_URL`` is not set.
    """
    primary = _primary()
    reads = _reads.get()
    if primary.in_transaction() or reads is None or reads.message is not current_message.get():
        return primary
    return reads.database()


def data_consistency_used() -> ReadSource:
    """Where the reads of the message at work went: to a replica, if one of them did."""
    reads = _reads.get()
    return reads.used if reads is not None and reads.message is current_message.get() else "primary"


def _primary() -> Database:
    if database.obj is None:
        raise SettingsError(
            "HOUSEKEEPING_DATABASE_URL is not set; it should be a URL such as postgresql://host/database"
        )
    primary: Database = database.obj
    return primary
