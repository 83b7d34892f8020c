"""Fencing tokens of leases, called epochs: a number that increases with each holder that fences, stored in PostgreSQL.

Redis decides who may begin. The epoch decides, within the transaction itself, who may still commit. A holder that
fences gets its epoch before it begins. Other holders ask the database nothing.

An actor fences by the lease. A run of a sweep checks its epoch in the statement of each batch, see
`ledger.runs.advance_cte`.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from peewee import PeeweeException
from psycopg2.extensions import TRANSACTION_STATUS_IDLE, TRANSACTION_STATUS_INERROR, TRANSACTION_STATUS_INTRANS

from housekeeping.core.errors import DatabaseUnavailable, HousekeepingError, LeaseLost, SchemaMissing
from housekeeping.core.logs import error_line
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry import current_message
from housekeeping.database.connection import database
from housekeeping.database.errors import Kind, kind_of
from housekeeping.ledger.leases import Fence, next_epoch
from housekeeping.ledger.schema import LeaseRow

#: Kinds of error of a server that accepts no commits for now.
_UNAVAILABLE: Final = (Kind.LOST, Kind.READ_ONLY, Kind.RESOURCES)


class DatabaseNotConfigured(HousekeepingError):
    """No database is configured, so there are no epochs."""


class Connection(Protocol):
    """An application's own DB-API connection to the same database."""

    def cursor(self) -> Any:
        """Return a cursor whose ``execute`` accepts ``%s`` parameters."""


def acquire_epoch(key: str, token: str) -> int:
    """Issue the next epoch of the key to the holder with this token, in a transaction of its own.

    Raises:
      DatabaseNotConfigured, DatabaseUnavailable, SchemaMissing: If no epochs are available.
      peewee.PeeweeException: For any other error, for example if a transaction of the last holder does not end.
    """
    if database.obj is None:
        which = "no database is configured (HOUSEKEEPING_DATABASE_URL)"
        if database.selected != MAIN:
            which = f"there is no database {database.selected!r} (HOUSEKEEPING_DATABASES)"
        raise DatabaseNotConfigured(f"lease {key!r} has no epoch: {which}")
    # Only a worker's thread keeps the connection for its next message.
    close = database.is_closed() and current_message.get() is None
    try:
        with database.atomic():
            return next_epoch(key, token)
    except PeeweeException as error:
        if kind_of(error) is Kind.STATEMENT:  # a missing schema, table, column or right
            raise SchemaMissing(f"{error_line(error)}; run: housekeeping init") from error
        if kind_of(error) in _UNAVAILABLE:
            raise DatabaseUnavailable(f"PostgreSQL did not answer: {error_line(error)}") from error
        raise
    finally:
        if close and not database.is_closed():
            database.close()


def check_epoch(fence: Fence, connection: Connection | None = None) -> None:
    """Check that the holder is still the latest. The next holder then waits until the current transaction ends.

    Parameters:
      connection: The connection of the transaction; by default the library's own.

    Raises:
      LeaseLost: If there is a newer holder. The transaction must be rolled back.
      HousekeepingError: Outside of a transaction, where the check would protect nothing.
    """
    leases = f'"{LeaseRow._meta.schema}".leases'
    where = "WHERE key = %s AND epoch = %s AND holder = %s"
    # FOR SHARE, so that the epoch of the next holder waits until this transaction ends.
    latest = fetch_row(
        connection,
        f"SELECT used_at < clock_timestamp() - interval '1 day' FROM {leases} {where} FOR SHARE",  # noqa: S608
        fence,
    )
    if latest is not None and latest[0]:
        # Keeps the row of a lease that is held for long from being deleted as unused. SKIP LOCKED, because two
        # transactions of this holder would wait for each other.
        fetch_row(
            connection,
            f"UPDATE {leases} SET used_at = clock_timestamp() WHERE key = "  # noqa: S608
            f"(SELECT key FROM {leases} {where} FOR NO KEY UPDATE SKIP LOCKED) RETURNING 1",
            fence,
        )
    refuse_outside_of_transaction(f"lease {fence.key!r}: fence()", connection)
    if latest is None:
        # The row can also be missing because the lease was neither acquired nor fenced for a long time.
        raise LeaseLost(f"lease {fence.key!r} has a newer holder; epoch {fence.epoch} is outdated")


def refuse_outside_of_transaction(call: str, connection: Connection | None) -> None:
    """Raise HousekeepingError if the connection has no open transaction, and a statement would begin none."""
    if connection is None and database.in_transaction():
        return  # it may begin with its first statement
    connection = connection or database.connection()
    status = getattr(getattr(connection, "info", None), "transaction_status", None)
    if status == TRANSACTION_STATUS_IDLE and getattr(connection, "autocommit", True):
        raise HousekeepingError(f"{call} was called outside of a transaction")


def fetch_row(connection: Connection | None, query: str, parameters: tuple[Any, ...]) -> Any:
    """Execute a statement on the application's connection, by default the library's own; return its first row."""
    if connection is None:
        return database.execute_sql(query, parameters).fetchone()
    cursor = connection.cursor()
    cursor.execute(query, parameters)
    row = cursor.fetchone()
    cursor.close()
    return row


def in_transaction() -> bool:
    """Return whether this thread has an open transaction on one of the library's connections."""
    for each in database.by_name().values():
        if each.is_closed():
            continue
        # The driver also knows transactions that were begun without peewee.
        status = each.connection().info.transaction_status
        if each.in_transaction() or status in (TRANSACTION_STATUS_INTRANS, TRANSACTION_STATUS_INERROR):
            return True
    return False
