"""The database handle of the library, its connections, and the base class of its models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import psycopg2
from peewee import InterfaceError, Model, OperationalError
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import parse_dsn

from housekeeping.core.errors import DatabaseUnavailable, SettingsError, TransactionEnded
from housekeeping.core.sanitize import error_line, mask_secrets
from housekeeping.database.errors import is_connection_lost as is_connection_lost
from housekeeping.database.errors import sqlstate as sqlstate
from housekeeping.database.handle import DatabaseHandle as DatabaseHandle
from housekeeping.database.peewee_database import Database as Database
from housekeeping.database.pooler import PreparedStatements


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
#: shortest default lease (10 minutes). The ``options`` of the URL follow and take precedence.
_SESSION: Final = (
    "-c timezone=UTC -c statement_timeout=30s -c lock_timeout=10s -c idle_in_transaction_session_timeout=60s -c jit=off"
)
#: A server that stops answering is detected after one minute. The system's defaults need eleven.
_CONNECTION: Final[dict[str, Any]] = {
    "application_name": "housekeeping",
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
    options = f"{_SESSION} {parameters.pop('options', '')}".strip()
    name = parameters.pop("dbname", "")  # without a name libpq uses the user's
    return Database(name, prepared_statements=prepared_statements, **{**_CONNECTION, **parameters}, options=options)


@contextmanager
def translate_postgres_errors() -> Iterator[None]:
    """Raise `DatabaseUnavailable`, with a message of one line, if the driver cannot reach the server."""
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        which = f"the database {database.selected!r}" if database.several() else "PostgreSQL"
        raise DatabaseUnavailable(f"{which} did not answer: {error_line(error)}") from error


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


class BaseModel(Model):
    """Base class of every model."""

    if not TYPE_CHECKING:  # a strict type checker would reject the Meta of every derived model

        class Meta:
            database = database
            legacy_table_names = False
