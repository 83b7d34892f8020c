"""The database handle of the library, and the base class and column type of its models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import psycopg2
from peewee import DateTimeField, InterfaceError, Model, OperationalError
from psycopg2.extensions import parse_dsn

from housekeeping.core.errors import DatabaseUnavailable, SettingsError
from housekeeping.core.sanitize import error_line, mask_secrets
from housekeeping.database.guarded_connection import GuardedConnection
from housekeeping.database.peewee_database import Database as Database
from housekeeping.database.peewee_database import DatabaseHandle
from housekeeping.database.peewee_database import sqlstate as sqlstate

#: Initialized once, when the application is composed (`housekeeping.app`, `install`, or a test).
database: Final = DatabaseHandle()

#: Parameters of each session. Statements and waits have limits so that a slow database costs a run its batch and not
#: its worker thread. All limits are far above a healthy batch and below the shortest default lease (10 minutes). The
#: ``options`` of the URL follow and take precedence.
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


def connect_to(url: str) -> Database:
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
    return Database(name, **{**_CONNECTION, **parameters}, options=options)


@contextmanager
def translate_postgres_errors() -> Iterator[None]:
    """Raise `DatabaseUnavailable`, with a message of one line, if the driver cannot reach the server."""
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        raise DatabaseUnavailable(f"PostgreSQL did not answer: {error_line(error)}") from error


class UtcDateTimeField(DateTimeField):
    """``timestamptz`` column that rejects naive datetimes and reads as UTC.

    Raises:
      ValueError: If a datetime without a timezone is written or compared.
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
    """Base class of every model."""

    if not TYPE_CHECKING:  # a strict type checker would reject the Meta of every derived model

        class Meta:
            database = database
            legacy_table_names = False
