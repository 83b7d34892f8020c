"""The one database handle, and what every table shares."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg2
from peewee import (
    DatabaseProxy,
    DateTimeField,
    InterfaceError,
    Model,
    OperationalError,
    PostgresqlDatabase,
    ProgrammingError,
    _transaction,
)
from psycopg2.extensions import TRANSACTION_STATUS_INERROR, TRANSACTION_STATUS_INTRANS, parse_dsn

from housekeeping.core.errors import DatabaseUnavailable, SettingsError
from housekeeping.core.sanitize import error_line, mask_secrets
from housekeeping.core.telemetry.io_timing import waiting_for
from housekeeping.database.extreme_times import read_extreme_times
from housekeeping.database.guarded_connection import GuardedConnection

T = TypeVar("T")


class _Handle(DatabaseProxy):
    """Begins transactions as the database behind it does: peewee's proxy passes that by and begins plain ones."""

    def transaction(self, *args: Any, **kwargs: Any) -> Any:
        return self.obj.transaction(*args, **kwargs)


#: Initialised once, by whoever composes the application (`housekeeping.app`, `install`, or a test).
database: Final = _Handle()

#: What libpq leaves to chance. Statements and waits are bounded so that a sick database costs a run its
#: batch, not its worker thread; all three are far above a healthy batch and below the shortest default
#: lease (10 minutes). The URL's own ``options`` come later and win.
_SESSION: Final = (
    "-c timezone=UTC -c statement_timeout=30s -c lock_timeout=10s -c idle_in_transaction_session_timeout=60s -c jit=off"
)
#: A server that vanished without a word is noticed after a minute, not after the eleven of the system's defaults.
_CONNECTION: Final[dict[str, Any]] = {
    "application_name": "housekeeping",
    "connect_timeout": "5",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
    "connection_factory": GuardedConnection,
}

#: PostgreSQL's code for a column that does not exist.
_UNDEFINED_COLUMN: Final = "42703"
_IN_TRANSACTION: Final = (TRANSACTION_STATUS_INTRANS, TRANSACTION_STATUS_INERROR)
#: What peewee notes of a thread's blocks, and forgets with its connection.
_WITHIN: Final = ("ctx", "transactions", "commit_callbacks")


class _Transaction(_transaction):
    """Leaves nothing open when an interrupt strikes where it begins or ends, which peewee does not expect.

    The connection would keep its locks, and what comes next would become part of the transaction and commit
    what its run was stopped from committing.
    """

    def __enter__(self) -> Any:
        try:
            return super().__enter__()
        except BaseException:
            self._leave_nothing_open()
            raise

    def __exit__(self, *error: Any) -> Any:
        try:
            return super().__exit__(*error)
        except BaseException:
            self._leave_nothing_open()
            raise

    def _leave_nothing_open(self) -> None:
        if self.db.in_transaction():
            return  # the outer one ends it
        self.db._take_unsaid()
        if self.db.is_closed():
            return
        if self.db.connection().info.transaction_status in _IN_TRANSACTION:
            self.db.rollback()


class _ThreadState(threading.local):
    #: The BEGIN of a transaction that the server has not heard of; empty: there is none.
    unsaid = ""


class Database(PostgresqlDatabase):
    """PostgreSQL with one connection a thread, which comes back after the server was away.

    A connection found dead where a transaction begins, or before a statement outside of one, is
    replaced and the step done again. Within a transaction the error is raised: what it did so far
    is lost with the connection, and only its caller can begin again.

    A transaction begins with its first statement, in one message to the server: a round trip less. So what goes past
    `execute_sql` takes `connection()` or `cursor()` within the transaction, not before it.
    """

    _state: Any  # peewee's own, of the thread
    _adapter: Any
    _isolation_level: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: Statements that named a column which is not there: what is known of the tables may be out of date.
        self.unknown_columns = 0
        self._of_thread = _ThreadState()
        super().__init__(*args, **kwargs)
        # peewee lets one thread connect or close at a time. What it guards is each thread's own, and a server that is
        # silent would keep all of them waiting, one connect timeout after the other.
        self._lock = nullcontext()

    def transaction(self, *args: Any, **kwargs: Any) -> Any:
        return _Transaction(self, *args, **kwargs)

    def _connect(self) -> Any:
        connection = super()._connect()  # type: ignore[misc]  # not in the stubs
        read_extreme_times(connection)
        return connection

    def connect(self, reuse_if_open: bool = False) -> bool:
        # The blocks that a thread is within are its code's, and do not end with a connection, as peewee has it.
        within = {name: getattr(self._state, name) for name in _WITHIN}
        try:
            connected: bool = super().connect(reuse_if_open)
        finally:
            vars(self._state).update(within)
        return connected

    def close(self) -> bool:
        closed: bool = super().close()
        self._take_unsaid()
        return closed

    def begin(self, isolation_level: int | str | None = None) -> None:
        with waiting_for("database"):
            self.connect(reuse_if_open=True)
        level = isolation_level or self._isolation_level
        kind = f" ISOLATION LEVEL {self._adapter.isolation_level_str(level)}" if level else ""
        self._of_thread.unsaid = f"BEGIN{kind}"

    def commit(self) -> None:
        if self._take_unsaid():
            return
        with waiting_for("database"):
            super().commit()

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        self._say_begin()
        return super().cursor(*args, **kwargs)

    def connection(self) -> Any:
        self._say_begin()
        return super().connection()

    def execute_sql(self, sql: str, params: Any = None) -> Any:
        with waiting_for("database"):
            try:
                return self._execute_sql(sql, params)
            except ProgrammingError as error:
                if sqlstate(error) == _UNDEFINED_COLUMN:
                    self.unknown_columns += 1
                raise

    def _execute_sql(self, sql: str, params: Any) -> Any:
        if begin := self._take_unsaid():
            return self._begun(begin, f"{begin}; {sql}", params)
        if self.in_transaction():
            return super().execute_sql(sql, params)
        if sql.startswith("SELECT"):
            return self._on_a_live_connection(lambda: super(Database, self).execute_sql(sql, params))
        # Asked first, because a write must not be done again: nobody knows whether it took effect.
        self._on_a_live_connection(lambda: super(Database, self).execute_sql("SELECT 1"))
        return super().execute_sql(sql, params)

    def _say_begin(self) -> None:
        """For who goes past `execute_sql`."""
        if begin := self._take_unsaid():
            with waiting_for("database"):
                self._begun(begin, begin)

    def _begun(self, begin: str, sql: str, params: Any = None) -> Any:
        """Carry out what a transaction begins with: nothing of it has been committed, so it may be done again."""
        try:
            return self._on_a_live_connection(lambda: super(Database, self).execute_sql(sql, params))
        except BaseException:
            # Nothing was begun where the driver refuses a statement, or the server its syntax: the next one must not
            # be a transaction of its own.
            if self.is_closed() or self._state.conn.info.transaction_status not in _IN_TRANSACTION:
                self._of_thread.unsaid = begin
            raise

    def _take_unsaid(self) -> str:
        unsaid, self._of_thread.unsaid = self._of_thread.unsaid, ""
        return unsaid

    def rollback(self) -> None:
        if self._take_unsaid():
            return
        try:
            super().rollback()
        except (OperationalError, InterfaceError):
            # A dead connection has rolled back; what killed it is the error to be seen, not this one.
            if self.is_connection_usable():
                raise

    def _on_a_live_connection(self, step: Callable[[], T]) -> T:
        try:
            return step()
        except (OperationalError, InterfaceError):
            # A statement that failed where a transaction begins leaves a connection that is well.
            if self.is_closed() or not self._state.conn.closed:
                raise
            self._state.closed = True  # peewee's own `close` refuses within a transaction
            self.connect()
            return step()


def connect_to(url: str) -> Database:
    """A database handle for `url`; nothing is connected before the first statement.

    Raises:
      SettingsError: When libpq cannot read the URL.
    """
    try:
        given = parse_dsn(url)
    except psycopg2.ProgrammingError as error:
        raise SettingsError(
            f"HOUSEKEEPING_DATABASE_URL is {mask_secrets(url)!r}; libpq says: {error_line(error)}"
        ) from None
    options = f"{_SESSION} {given.pop('options', '')}".strip()
    name = given.pop("dbname", "")  # none given: libpq takes the user's name
    return Database(name, **{**_CONNECTION, **given}, options=options)


@contextmanager
def translate_postgres_errors() -> Iterator[None]:
    """Turn the driver's "could not reach the server" into `DatabaseUnavailable`, in one line."""
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        raise DatabaseUnavailable(f"PostgreSQL did not answer: {error_line(error)}") from error


def sqlstate(error: BaseException) -> str | None:
    """PostgreSQL's five-character code for the error; None when the server had no say in it."""
    code: str | None = getattr(getattr(error, "orig", None), "pgcode", None)
    return code


class UtcDateTimeField(DateTimeField):
    """A ``timestamptz`` column that refuses naive datetimes and reads as UTC.

    Raises:
      ValueError: On writing or comparing with a datetime that has no timezone.
    """

    field_type = "TIMESTAMPTZ"

    def db_value(self, value: datetime | None) -> Any:
        if value is not None and value.tzinfo is None:
            raise ValueError(f"{self.name}: {value!r} has no timezone")
        return value

    def python_value(self, value: Any) -> Any:
        value = super().python_value(value)
        return value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value


class BaseModel(Model):
    """Base class of every table."""

    if not TYPE_CHECKING:  # a strict type checker would refuse the Meta of every model derived from it

        class Meta:
            database = database
            legacy_table_names = False
