"""Replicas, and the choice of one that has replayed a WAL position."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple, TypeVar

import psycopg2
from peewee import InterfaceError, OperationalError, PeeweeException
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from housekeeping.core.sanitize import error_line, mask_secrets
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry.context import waiting_for
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.connection import Database, connect_to, sqlstate
from housekeeping.database.pooler import PreparedStatements
from housekeeping.database.replicas.routing import primary_named, routing_of
from housekeeping.database.replicas.wal_position import RETRY_AFTER, WalPosition

logger = named_logger(__name__)

#: Maximum time to wait for a replica that lags. A healthy one is some milliseconds behind, or up to the 200 ms of
#: wal_writer_delay if commits do not wait for the disk. One that is further behind would not catch up in a second.
MAX_WAIT: Final = timedelta(seconds=0.5)
_POLL_S: Final = 0.02  # PostgreSQL does not notify clients of its replay position
#: A promoted replica accepts writes. This library must not write to it.
_READ_ONLY: Final = "-c default_transaction_read_only=on"
#: As in `wal_position`: a replica that hangs must not delay a message for long.
_CONNECTION: Final = {"connect_timeout": "2", "tcp_user_timeout": "5000"}
#: A statement that was canceled, by its timeout or by a shutdown, is not repeated on the primary.
_CANCELED: Final = "57014"
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
        template = connect_to(url)
        options = f"{template.connect_params['options']} {_READ_ONLY}"
        parameters = {**template.connect_params, **_CONNECTION, "options": options}
        super().__init__(template.database, prepared_statements=prepared_statements, **parameters)
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
            if sqlstate(error) == _CANCELED:
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
