"""The database handle of the library, its connections, and the base class of its models.

peewee's PostgreSQL database reconnects here, and its transactions are cheaper. That uses internals of peewee, which has
no public way to change how a transaction begins, or to keep the state of a thread when its connection is replaced.
tests/unit/database/test_peewee_database.py fails if a release of peewee lacks a private attribute used here.

Through a pooler in transaction mode, such as PgBouncer, each transaction may run on another server. A setting of the
session would be lost, or reach another client. So the settings travel with each transaction.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar
from uuid import uuid4

import psycopg2
from peewee import (  # type: ignore[attr-defined]  # the wrapper of the driver's errors is not in the stubs
    DatabaseProxy,
    InterfaceError,
    Model,
    NotSupportedError,
    OperationalError,
    PostgresqlDatabase,
    ProgrammingError,
    __exception_wrapper__,
    _transaction,
)
from psycopg2 import OperationalError as DriverOperationalError
from psycopg2 import extensions, sql
from psycopg2.extensions import (
    TRANSACTION_STATUS_IDLE,
    TRANSACTION_STATUS_INERROR,
    TRANSACTION_STATUS_INTRANS,
    parse_dsn,
)
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

from housekeeping.core.clock import PATIENCE_S, contacting, is_impatient, is_silent, limit_ms, waiting
from housekeeping.core.errors import DatabaseUnavailable, SettingsError, TransactionEnded
from housekeeping.core.logs import error_line, mask_secrets
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry import waiting_for
from housekeeping.database.errors import is_disk_full, sqlstate

#: Value of ``HOUSEKEEPING_PREPARED_STATEMENTS``. ``auto`` tests each connection, ``on`` means that all are direct,
#: ``off`` that all lead through a pooler.
PreparedStatements = Literal["auto", "on", "off"]

#: What PgBouncer and RDS Proxy answer to the startup parameter ``options``.
_REJECTED: Final = re.compile("unsupported startup parameter|support command-line options", re.IGNORECASE)
#: A word of ``options``. A backslash escapes the next character.
_WORD: Final = re.compile(r"(?:\\.|[^\s\\])+")
#: Settings whose value is a list of identifiers.
_LISTS: Final = ("search_path", "temp_tablespaces")
_ITEM: Final = re.compile(r'"((?:[^"]|"")*)"|([^,\s]+)')
#: Default for later transactions -> the setting that applies to the current one and is sent instead.
_OF_TRANSACTION: Final = {
    "default_transaction_read_only": "transaction_read_only",
    "default_transaction_isolation": "transaction_isolation",
    "default_transaction_deferrable": "transaction_deferrable",
}
_NAME_LENGTH: Final = 50  # bytes; PostgreSQL cuts application names at 63


class PooledCursor(Cursor):
    """Cursor that sends the connection's settings together with the first statement of each transaction.

    They precede ``BEGIN`` in the same message. PostgreSQL makes one transaction of both.
    """

    def execute(self, query: Any, vars: Any = None) -> None:
        connection: Any = self.connection
        if connection.get_transaction_status() == TRANSACTION_STATUS_IDLE:
            query, vars = connection.transaction_settings + self.mogrify(query, vars), None
        super().execute(query, vars)


def use_pooler(connection: Any, options: str) -> None:
    """Send the settings in `options` with each transaction of the connection, and give the transactions a name.

    The name is the transaction's ``application_name``. `StatementInProgress` finds the server process by it, because
    the process id that libpq knows is not the server's.
    """
    name = str(connection.info.dsn_parameters.get("application_name", "")).encode()[:_NAME_LENGTH]
    connection.transaction_name = f"{name.decode(errors='ignore')} {uuid4().hex[:12]}"
    settings = {"datestyle": "ISO"} | ({"transaction_timeout": "0"} if connection.server_version >= 170_000 else {})
    settings |= read_options(options) | {"application_name": connection.transaction_name}
    statements = [_set_local(name, value) for name, value in settings.items()]
    connection.transaction_settings = sql.SQL("").join(statements).as_string(connection).encode(connection.encoding)
    connection.cursor_factory = PooledCursor


#: Lifts a limit for whole transactions, which PostgreSQL 16 would reject in ``options``, unless the URL sets it.
_PROBE: Final = """SELECT pg_backend_pid(), (SELECT set_config(name, '0', false) FROM pg_settings
WHERE name = 'transaction_timeout' AND source <> 'client' AND pg_backend_pid() = %s)"""


def set_up_if_direct(connection: Any) -> bool:
    """Lift `transaction_timeout` for a direct connection, in one round trip. Return False if it leads to a pooler."""
    with connection.cursor() as cursor:
        cursor.execute(_PROBE, (connection.info.backend_pid,))
        return bool(cursor.fetchone()[0] == connection.info.backend_pid)


def read_options(options: str) -> dict[str, str]:
    """Return the settings in a value of libpq's parameter ``options``: name -> value.

    Raises:
      SettingsError: If it has another option than settings.
    """
    settings = {}
    words = (re.sub(r"\\(.)", r"\1", word) for word in _WORD.findall(options))
    for word in words:
        prefix, text = word[:2], word[2:]
        name, equals, value = (next(words, "") if word == "-c" else text).partition("=")
        if prefix not in ("-c", "--") or not equals:
            raise SettingsError(
                f"HOUSEKEEPING_DATABASE_URL has the option {word!r}, which cannot be sent through a connection pooler; "
                "it should be -c name=value"
            )
        settings[name.replace("-", "_").lower()] = value
    return settings


def _set_local(name: str, value: str) -> sql.Composable:
    values = [value]
    if name in _LISTS:
        items = _ITEM.findall(value)
        values = [quoted.replace('""', '"') or plain.lower() for quoted, plain in items] or [""]
    return sql.SQL("SET LOCAL {} = {}; ").format(
        sql.Identifier(*_OF_TRANSACTION.get(name, name).split(".")), sql.SQL(", ").join(map(sql.Literal, values))
    )


def read_extreme_times(connection: Any) -> None:
    """Let the connection read a date or time outside of Python's range as the nearest one within it.

    PostgreSQL can store the year 10000 or 44 BC. psycopg2 raises ValueError for it, which would end a run at a row that
    its statement can delete. It already reads infinity as the nearest date.
    """
    for base, smallest, largest in (
        (extensions.PYDATE, date.min, date.max),
        (extensions.PYDATETIME, datetime.min, datetime.max),  # noqa: DTZ901 a timestamp without zone
        (extensions.PYDATETIMETZ, datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)),
    ):
        caster = extensions.new_type(base.values, base.name, _nearest(base, smallest, largest))
        extensions.register_type(caster, connection)


def _nearest(read: Any, smallest: date, largest: date) -> Callable[[str | None, Any], Any]:
    def nearest(value: str | None, cursor: Any) -> Any:
        try:
            return read(value, cursor)
        except (ValueError, OverflowError):
            assert value is not None
            # For example "0044-03-15 00:00:00+00 BC". Near year 1, a time in another zone can be in the year before.
            return smallest if value.endswith(" BC") or value.startswith("0001") else largest

    return nearest


T = TypeVar("T")

#: SQLSTATEs undefined_column and feature_not_supported.
_OUTDATED_CATALOG: Final = ("42703", "0A000")
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

    Parameters:
      prepared_statements: Whether connections are direct, so that they keep settings and prepared statements.

    Attributes:
      catalog_errors: Number of statements that failed because a column does not exist, or the server cannot do it, as
        Citus with a table that was distributed. After such an error, cached facts about tables may be outdated.
    """

    _state: Any  # of the current thread
    _adapter: Any
    _isolation_level: Any

    def __init__(self, *args: Any, prepared_statements: PreparedStatements = "auto", **kwargs: Any) -> None:
        self.prepared_statements: Final = prepared_statements
        self.catalog_errors = 0
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
        with contacting(self._server, DriverOperationalError):
            connection = None if self.prepared_statements == "off" else self._connect_with_options()
            if connection is None:
                connection = self._open(options=None)
                use_pooler(connection, self.connect_params.get("options", ""))
        read_extreme_times(connection)
        return connection

    @property
    def _server(self) -> str:
        names = ("service", "host", "hostaddr", "port")
        return f"PostgreSQL {[self.connect_params.get(name) for name in names]}"

    def _connect_with_options(self) -> Any:
        """Return a connection, which may lead to a pooler; None if a pooler rejects the parameter ``options``."""
        if self._rejects_options:
            return None
        try:
            connection = self._open()
        except DriverOperationalError as error:
            if self.prepared_statements == "on" or not _REJECTED.search(str(error)):
                raise
            self._rejects_options = True
            return None
        if not set_up_if_direct(connection) and self.prepared_statements == "auto":
            use_pooler(connection, self.connect_params.get("options", ""))
        return connection

    def _open(self, **changes: Any) -> Any:
        if is_impatient():
            changes["connect_timeout"] = str(PATIENCE_S)
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
        with self._waiting():
            super().commit()

    def rollback(self) -> None:
        if self._take_pending_begin():
            return
        try:
            with self._waiting():
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
        """Wait for a statement in the block; count an error that `catalog_errors` counts."""
        with self._waiting():
            try:
                yield
            except (ProgrammingError, NotSupportedError) as error:
                self.catalog_errors += sqlstate(error) in _OUTDATED_CATALOG
                raise

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time of the block, in which the server answers. Within `impatient`, end it if the server hangs."""
        with waiting_for("database"), waiting(self._server, partial(self._hang_up_if_silent, vars(self._state))):
            yield

    def _hang_up_if_silent(self, state: dict[str, Any]) -> None:
        """Shut down the connection of a thread if the server no longer accepts new ones; a statement may take long."""
        connection = state.get("conn")
        if connection is None or connection.closed:
            return  # libpq limits the time for a new one
        try:
            with contacting(self._server, DriverOperationalError):
                self._open(options=None).close()
        except DriverOperationalError:
            if is_silent(self._server):  # otherwise it answers, such as that it has too many connections
                _hang_up(connection)

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
            with self._waiting():
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


def _hang_up(connection: Any) -> None:
    """Shut down the socket of the connection, so that the thread that waits for the server gets an error."""
    with suppress(OSError, psycopg2.Error), socket.socket(fileno=os.dup(connection.fileno())) as its_socket:
        its_socket.shutdown(socket.SHUT_RDWR)


#: The configured databases by name.
_databases: Final[dict[str, Database]] = {}
_current: Final[ContextVar[str]] = ContextVar("current_database", default=MAIN)


class DatabaseHandle(DatabaseProxy):
    """Proxy of the database with the given name, or of the database that is current in this thread.

    Its transactions are those of `Database`; peewee's proxy would begin plain ones.

    Parameters:
      name: None for the current database: `MAIN`, or within `using` another one.
    """

    def __init__(self, name: str | None = None) -> None:
        # peewee's proxies reject other attributes, and begin without a database.
        object.__setattr__(self, "_fixed_name", name)
        self._callbacks: list[Callable[[Any], object]] = []

    @property
    def selected(self) -> str:
        """The name of this handle's database."""
        name: str | None = self._fixed_name
        return name or _current.get()

    @property
    def obj(self) -> Database | None:
        """The database; None if there is none of this name."""
        return _databases.get(self.selected)

    @obj.setter
    def obj(self, database: Database | None) -> None:
        if database is None:
            _databases.pop(self.selected, None)
        else:
            _databases[self.selected] = database

    @staticmethod
    @contextmanager
    def using(name: str) -> Iterator[None]:
        """Make the database with this name the current one in the block, for this thread."""
        before = _current.set(name)
        try:
            yield
        finally:
            _current.reset(before)

    @staticmethod
    def by_name() -> dict[str, Database]:
        """Return every configured database by name, `MAIN` first."""
        return dict(sorted(_databases.items(), key=lambda each: each[0] != MAIN))

    @staticmethod
    def several() -> bool:
        """Return whether several databases are configured, so that texts must name them."""
        return len(_databases) > 1

    @property
    def place(self) -> str:
        """This handle's database in words, with its name if several are configured."""
        return f"the database {self.selected!r}" if self.several() else "this database"

    def transaction(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("transaction")(*args, **kwargs)


def _refused_while_lent(method: str, call: str) -> Any:
    def guarded(self: GuardedConnection, *args: Any, **kwargs: Any) -> Any:
        if self._lent:
            raise TransactionEnded(f"{call} would end the batch's transaction, which the engine ends; leave it open")
        return getattr(Connection, method)(self, *args, **kwargs)

    return guarded


class GuardedConnection(Connection):
    """psycopg2 connection that, while it is lent, executes statements and nothing else.

    The library uses autocommit mode, in which psycopg2 ignores `commit` and `rollback`, but ``with connection:`` still
    commits. While the connection is lent, all three raise TransactionEnded, and so does `close`.

    Attributes:
      prepared: Prepared statements of this connection: `PreparedQuery` -> their names.
      transaction_settings: Statements that begin each transaction if the connection leads to a pooler; else empty.
      transaction_name: The ``application_name`` of each transaction in that case.
    """

    _lent = False
    commit = _refused_while_lent("commit", "commit()")
    rollback = _refused_while_lent("rollback", "rollback()")
    close = _refused_while_lent("close", "close()")
    set_session = _refused_while_lent("set_session", "set_session()")
    __enter__ = _refused_while_lent("__enter__", "with connection:")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prepared: dict[Any, list[str]] = {}
        self.transaction_settings = b""
        self.transaction_name = ""

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Raise TransactionEnded if code within the block tries to end the transaction."""
        self._lent = True
        try:
            yield
        finally:
            self._lent = False


#: The current database of the thread. A run of a worker makes the worker's database the current one; otherwise it is
#: `MAIN`. Initialized once, when the application is composed (`housekeeping.app`, `install`, or a test).
database: Final = DatabaseHandle()
_handles: Final[dict[str, DatabaseHandle]] = {}

#: Settings of each session, or of each transaction through a pooler. Statements and waits have limits so that a slow
#: database costs a run its batch and not its worker thread. All limits are far above a healthy batch and below the
#: shortest default lease (10 minutes). Keys of type bytea are identified by their text, so it has one form. The
#: ``options`` of the URL follow and take precedence.
_SESSION: Final = (
    "-c timezone=UTC -c statement_timeout=30s -c lock_timeout=10s -c idle_in_transaction_session_timeout=60s "
    "-c jit=off -c bytea_output=hex"
)
#: Follows the ``options`` of the URL. Whatever the default of the database or the role: with a snapshot of the whole
#: transaction, rows that others have changed meanwhile would fail a batch instead of being skipped or seen as they are.
_ISOLATION: Final = r"-c default_transaction_isolation=read\ committed"
#: A server that stops answering is detected after one minute. The system's defaults need eleven.
_CONNECTION: Final[dict[str, Any]] = {
    "application_name": "housekeeping",
    "client_encoding": "UTF8",  # PostgreSQL converts from and to that of the database
    "connect_timeout": "5",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
    "connection_factory": GuardedConnection,
}


def connect_to(url: str, prepared_statements: PreparedStatements = "auto") -> Database:
    """Return a database handle for `url`; it connects with its first statement.

    Raises:
      SettingsError: If libpq cannot parse the URL.
    """
    try:
        parameters = parse_dsn(url)
    except psycopg2.ProgrammingError as error:
        raise SettingsError(
            f"HOUSEKEEPING_DATABASE_URL is {mask_secrets(url)!r}; libpq says: {error_line(error)}"
        ) from None
    options = " ".join(filter(None, (_SESSION, parameters.pop("options", ""), _ISOLATION)))
    name = parameters.pop("dbname", "")  # without a name libpq uses the user's
    return Database(name, prepared_statements=prepared_statements, **{**_CONNECTION, **parameters}, options=options)


@contextmanager
def translate_postgres_errors() -> Iterator[None]:
    """Raise `DatabaseUnavailable`, with a message of one line, if the driver cannot reach the server."""
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        which = f"the database {database.selected!r}" if database.several() else "PostgreSQL"
        problem = "has a full disk" if is_disk_full(error) else "did not answer"
        raise DatabaseUnavailable(f"{which} {problem}: {error_line(error)}") from error


def use_databases(urls: Mapping[str, str], prepared_statements: PreparedStatements) -> None:
    """Replace the configured databases by those with these URLs, by name; nothing is connected yet.

    Raises:
      SettingsError: If libpq cannot parse a URL.
    """
    given = {name: connect_to(url, prepared_statements) for name, url in urls.items()}
    for name in [name for name in database.by_name() if name not in given]:
        with database.using(name):
            database.initialize(None)
    for name, handle in given.items():
        with database.using(name):
            database.initialize(handle)


def handle_of(name: str) -> DatabaseHandle:
    """Return the handle of the database with this name, whichever is current."""
    return _handles.setdefault(name, DatabaseHandle(name))


def bind(model: type[Model], handle: DatabaseHandle) -> None:
    """Let the model's statements run on the handle's database."""
    meta: Any = model._meta
    if meta.database is not handle and isinstance(meta.database, DatabaseHandle):
        meta.set_database(handle)


def close_databases() -> None:
    """Close this thread's connections to all databases."""
    for each in database.by_name().values():
        if not each.is_closed():
            each.close()


def _forget_connections() -> None:
    """Leave the parent's connections alone in a forked child, which connects by itself."""
    for each in database.by_name().values():
        each._thread_state = _ThreadState()
        # Not closed, which would end the parent's session. psycopg2 closes no connection of another process.
        each._state.reset()


os.register_at_fork(after_in_child=_forget_connections)


class BaseModel(Model):
    """Base class of every model."""

    if not TYPE_CHECKING:  # a strict type checker would reject the Meta of every derived model

        class Meta:
            database = database
            legacy_table_names = False


#: Limits for a command or page that shows many workers, where one of them must not delay the others. A bounded count by
#: an index takes milliseconds; a table that is locked for longer is locked by a person or a migration.
STATEMENT_TIME: Final = timedelta(seconds=2)
LOCK_TIME: Final = timedelta(seconds=0.3)

#: Keeps shorter limits of the session.
_SHORTEN: Final = """SELECT set_config(name, least(nullif(setting::bigint, 0), ms)::text, true)
FROM pg_settings JOIN (VALUES ('statement_timeout', %s), ('lock_timeout', %s)) AS given (name, ms) USING (name)
"""


@contextmanager
def time_limit(statement: timedelta, lock: timedelta | None = None) -> Iterator[None]:
    """Run the block in a transaction with limits for each statement, and for each wait for a lock (default: the same).

    A statement that takes longer raises peewee's error for SQLSTATE 57014, a longer wait the one for 55P03.
    """
    with database.atomic():
        shorten_time_limits(statement, lock)
        yield


def shorten_time_limits(statement: timedelta, lock: timedelta | None = None) -> None:
    """Lower the limits for the rest of the open transaction, as `time_limit` does."""
    database.execute_sql(*_shortened(statement, lock))


def select_within(sql: str, params: Sequence[Any], statement: timedelta) -> list[tuple[Any, ...]]:
    """Return the rows of a SELECT with the limits of `time_limit`, in one round trip.

    Within a transaction, the limits apply until its end.
    """
    limits, values = _shortened(statement, None)
    rows: list[tuple[Any, ...]] = database.execute_sql(f"{limits}; {sql}", [*values, *params]).fetchall()
    return rows


def _shortened(statement: timedelta, lock: timedelta | None) -> tuple[str, list[int]]:
    return _SHORTEN, [limit_ms(each) for each in (statement, lock or statement)]
