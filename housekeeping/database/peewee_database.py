"""peewee's PostgreSQL database with reconnection and cheaper transactions.

It uses internals of peewee, which has no public way to change how a transaction begins, or to keep the state of a
thread when its connection is replaced. tests/unit/database/test_peewee_database.py fails if a release of peewee lacks a
private attribute used here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, TypeVar

from peewee import (  # type: ignore[attr-defined]  # the wrapper of the driver's errors is not in the stubs
    InterfaceError,
    OperationalError,
    PostgresqlDatabase,
    ProgrammingError,
    __exception_wrapper__,
    _transaction,
)
from psycopg2 import OperationalError as DriverOperationalError
from psycopg2.extensions import TRANSACTION_STATUS_INERROR, TRANSACTION_STATUS_INTRANS

from housekeeping.core.telemetry.context import waiting_for
from housekeeping.database.errors import sqlstate
from housekeeping.database.pooler import PreparedStatements, leads_to_pooler, rejects_options, use_pooler
from housekeeping.database.times import read_extreme_times

T = TypeVar("T")

#: PostgreSQL's code for a column that does not exist.
_UNDEFINED_COLUMN: Final = "42703"
_IN_TRANSACTION: Final = (TRANSACTION_STATUS_INTRANS, TRANSACTION_STATUS_INERROR)
#: peewee's record of the open blocks of a thread, which it resets with each connection.
_BLOCKS: Final = ("ctx", "transactions", "commit_callbacks")


class _Transaction(_transaction):
    """Transaction that is rolled back if an interrupt arrives while it begins or ends; peewee leaves it open.

    An open transaction would keep its locks, and the next statements would become part of it. They would commit what
    the interrupted run must not commit.
    """

    def __enter__(self) -> Any:
        try:
            return super().__enter__()
        except BaseException:
            self._roll_back()
            raise

    def __exit__(self, *error: Any) -> Any:
        try:
            return super().__exit__(*error)
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self.db.in_transaction():
            return  # the outer transaction is rolled back by its own block
        self.db._take_pending_begin()
        if self.db.is_closed():
            return
        if self.db.connection().info.transaction_status in _IN_TRANSACTION:
            self.db.rollback()


class _ThreadState(threading.local):
    #: The BEGIN statement that has not been sent to the server, or an empty string.
    pending_begin = ""


class Database(PostgresqlDatabase):
    """PostgreSQL with one connection for each thread, which is replaced after the server was away.

    A dead connection is replaced, and its statement retried, at the beginning of a transaction and before a statement
    outside of one. Within a transaction the error is raised, because earlier statements are lost with the connection
    and only the caller can repeat them.

    ``BEGIN`` is sent together with the transaction's first statement, which saves a round trip. So code that does not
    use `execute_sql` must call `connection()` or `cursor()` within the transaction, not before it.

    Through a pooler, the startup parameter ``options`` is sent as settings of each transaction.

    Parameters:
      prepared_statements: Whether connections are direct, so that they keep settings and prepared statements.

    Attributes:
      unknown_columns: Number of statements that named a column that does not exist. After such an error, what is
        cached about the tables may be outdated.
    """

    _state: Any  # of the current thread
    _adapter: Any
    _isolation_level: Any

    def __init__(self, *args: Any, prepared_statements: PreparedStatements = "auto", **kwargs: Any) -> None:
        self.prepared_statements: Final = prepared_statements
        self.unknown_columns = 0
        self._rejects_options = False
        self._thread_state = _ThreadState()
        super().__init__(*args, **kwargs)
        # peewee lets one thread connect or close at a time. Its lock protects only per-thread state, and while a server
        # does not answer, every thread would wait for all connect timeouts before its own.
        self._lock = nullcontext()

    def transaction(self, *args: Any, **kwargs: Any) -> Any:
        return _Transaction(self, *args, **kwargs)

    def _connect(self) -> Any:
        # peewee's own `_connect` cannot leave out the parameter ``options``.
        connection = None if self.prepared_statements == "off" else self._connect_with_options()
        if connection is None:
            connection = self._open(options=None)
            use_pooler(connection, self.connect_params.get("options", ""))
        read_extreme_times(connection)
        return connection

    def _connect_with_options(self) -> Any:
        """Return a connection, which may lead to a pooler; None if a pooler rejects the parameter ``options``."""
        if self._rejects_options:
            return None
        try:
            connection = self._open()
        except DriverOperationalError as error:
            if self.prepared_statements == "on" or not rejects_options(error):
                raise
            self._rejects_options = True
            return None
        if self.prepared_statements == "auto" and leads_to_pooler(connection):
            use_pooler(connection, self.connect_params.get("options", ""))
        return connection

    def _open(self, **changes: Any) -> Any:
        connection = self._adapter.connect(self, **self.connect_params | changes)
        if self._isolation_level:
            connection.set_isolation_level(self._isolation_level)
        connection.autocommit = True
        return connection

    def connect(self, reuse_if_open: bool = False) -> bool:
        # peewee forgets the open blocks of the thread here. The code is still inside of them.
        blocks = {name: getattr(self._state, name) for name in _BLOCKS}
        try:
            connected: bool = super().connect(reuse_if_open)
        finally:
            vars(self._state).update(blocks)
        return connected

    def close(self) -> bool:
        closed: bool = super().close()
        self._take_pending_begin()
        return closed

    def begin(self, isolation_level: int | str | None = None) -> None:
        with waiting_for("database"):
            self.connect(reuse_if_open=True)
        level = isolation_level or self._isolation_level
        kind = f" ISOLATION LEVEL {self._adapter.isolation_level_str(level)}" if level else ""
        self._thread_state.pending_begin = f"BEGIN{kind}"

    def commit(self) -> None:
        if self._take_pending_begin():
            return
        with waiting_for("database"):
            super().commit()

    def rollback(self) -> None:
        if self._take_pending_begin():
            return
        try:
            super().rollback()
        except (OperationalError, InterfaceError):
            # A dead connection is rolled back already, and the error that ended it is the one to raise.
            if self.is_connection_usable():
                raise

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        self._send_pending_begin()
        return super().cursor(*args, **kwargs)

    def connection(self) -> Any:
        self._send_pending_begin()
        return super().connection()

    def execute_sql(self, sql: str, params: Any = None) -> Any:
        with self._statement():
            return self._execute_sql(sql, params)

    def fetch_at_once(self, text: bytes) -> list[tuple[Any, ...]]:
        """Execute statements in one round trip and a transaction of their own; return the rows of the last one.

        They are never repeated: after a lost connection it is unknown whether they have taken effect.
        """
        with self._statement(), __exception_wrapper__:
            cursor = self.cursor()
            cursor.execute(text)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            return rows

    def mogrify(self, sql: str, params: Any) -> bytes:
        """Return the statement with its parameters, as it is sent to the server."""
        text: bytes = self.cursor().mogrify(sql, params)
        return text

    def prepared(self) -> dict[Any, list[str]] | None:
        """Return the prepared statements of the thread's connection: query -> names. None through a pooler."""
        connection = self.connection()
        prepared: dict[Any, list[str]] = connection.prepared
        return None if connection.transaction_settings else prepared

    @contextmanager
    def _statement(self) -> Iterator[None]:
        """Count the time of the block, and whether its statement names a column that does not exist."""
        with waiting_for("database"):
            try:
                yield
            except ProgrammingError as error:
                if sqlstate(error) == _UNDEFINED_COLUMN:
                    self.unknown_columns += 1
                raise

    def _execute_sql(self, sql: str, params: Any) -> Any:
        if begin := self._take_pending_begin():
            return self._execute_first(begin, f"{begin}; {sql}", params)
        if self.in_transaction():
            return super().execute_sql(sql, params)
        if sql.startswith("SELECT"):
            return self._reconnect_if_dead(lambda: super(Database, self).execute_sql(sql, params))
        # Checked before, because a write must not be repeated: it may have taken effect although its answer was lost.
        self._reconnect_if_dead(lambda: super(Database, self).execute_sql("SELECT 1"))
        return super().execute_sql(sql, params)

    def _send_pending_begin(self) -> None:
        if begin := self._take_pending_begin():
            with waiting_for("database"):
                self._execute_first(begin, begin)

    def _execute_first(self, begin: str, sql: str, params: Any = None) -> Any:
        """Execute the first statement of a transaction; it can be retried, because nothing has been committed."""
        try:
            return self._reconnect_if_dead(lambda: super(Database, self).execute_sql(sql, params))
        except BaseException:
            # If the driver or the server's parser rejected the statement, no transaction has begun. Without its BEGIN
            # the next statement would be a transaction of its own.
            if self.is_closed() or self._state.conn.info.transaction_status not in _IN_TRANSACTION:
                self._thread_state.pending_begin = begin
            raise

    def _take_pending_begin(self) -> str:
        begin, self._thread_state.pending_begin = self._thread_state.pending_begin, ""
        return begin

    def _reconnect_if_dead(self, step: Callable[[], T]) -> T:
        try:
            return step()
        except (OperationalError, InterfaceError):
            # A first statement can also fail on a connection that is alive.
            if self.is_closed() or not self._state.conn.closed:
                raise
            self._state.closed = True  # `close` refuses within a transaction
            self.connect()
            return step()
