"""Fencing tokens of leases, called epochs: a number that increases with each acquisition, stored in PostgreSQL.

Redis decides who may begin. The epoch decides, within the transaction itself, who may still commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from peewee import SQL, BigIntegerField, PeeweeException, TextField
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from housekeeping.core.errors import (
    DatabaseUnavailable,
    HousekeepingError,
    LeaseLost,
    SchemaMissing,
)
from housekeeping.core.sanitize import error_line
from housekeeping.database.connection import BaseModel, database, sqlstate
from housekeeping.database.times import UtcDateTimeField

#: Codes of a missing schema, table or column, and of missing rights.
_SCHEMA_MISSING: Final = ("3F000", "42P01", "42501", "42703")
#: Codes of a server that accepts no commits for now: read-only, shutting down, starting, too many connections.
_NOT_WRITABLE: Final = ("25006", "57P01", "57P02", "57P03", "53300")

#: The column's default, because an identity column needs no right on its sequence.
_NEXT_EPOCH: Final = SQL("DEFAULT")
_NOW: Final = SQL("clock_timestamp()")


class DatabaseNotConfigured(HousekeepingError):
    """No database is configured, so there are no epochs."""


class Lease(BaseModel):
    """Latest epoch of a lease, and the token of its holder.

    All keys share one sequence. So a row can be deleted, and the next epoch of its key is still higher. `used_at` is
    the time of the last acquisition, or of the last fence to within a day.
    """

    key = TextField(primary_key=True)
    epoch = BigIntegerField()
    holder = TextField()
    used_at = UtcDateTimeField()

    class Meta:
        table_name = "leases"
        schema = "housekeeping"


class Connection(Protocol):
    """An application's own DB-API connection to the same database."""

    def cursor(self) -> Any:
        """Return a cursor whose ``execute`` accepts ``%s`` parameters."""


def next_epoch(key: str, token: str) -> int:
    """Issue the next epoch of the key, in the current transaction.

    Waits for open transactions of the last holder that have checked their epoch.
    """
    # The row is locked before the number is drawn. Otherwise a lower number could be written after a higher one.
    previous = Lease.select(Lease.epoch).where(Lease.key == key).for_update().tuples().first()
    columns = {Lease.epoch: _NEXT_EPOCH, Lease.holder: token, Lease.used_at: _NOW}
    if previous is None:
        return _written_epoch(
            Lease.insert({Lease.key: key, **columns}).on_conflict(conflict_target=[Lease.key], update=columns),
        )
    while True:
        epoch = _written_epoch(Lease.update(columns).where(Lease.key == key))
        # An older version of the library increased epochs without the sequence, as does a manual release.
        if epoch > previous[0]:
            return epoch


def _written_epoch(query: Any) -> int:
    epoch: int = next(iter(query.returning(Lease.epoch).tuples().execute()))[0]
    return epoch


def acquire_epoch(key: str, token: str) -> int:
    """Issue the next epoch of the key, in a transaction of its own.

    Raises:
      DatabaseNotConfigured, DatabaseUnavailable, SchemaMissing: If no epochs are available.
      peewee.PeeweeException: For any other error, for example if a transaction of the last holder does not end.
    """
    if database.obj is None:
        raise DatabaseNotConfigured("no database is configured (HOUSEKEEPING_DATABASE_URL)")
    with _restore_connection_state():
        try:
            with database.atomic():
                return next_epoch(key, token)
        except PeeweeException as error:
            reason = _unavailable(error)
            if reason is None:
                raise
            raise reason from error


def check_epoch(key: str, epoch: int, connection: Connection | None = None) -> None:
    """Check that the epoch is still the latest, and hold back the next one until the current transaction ends.

    Parameters:
      connection: The connection of the transaction; by default the library's own.

    Raises:
      LeaseLost: If a higher epoch exists. The transaction must be rolled back.
      HousekeepingError: Outside of a transaction, where the check would protect nothing.
    """
    leases = f'"{Lease._meta.schema}".leases'
    where = "WHERE key = %s AND epoch = %s"
    # FOR SHARE, so that the epoch of the next holder waits until this transaction ends.
    latest = _fetch_row(
        connection,
        f"SELECT used_at < clock_timestamp() - interval '1 day' FROM {leases} {where} FOR SHARE",  # noqa: S608
        (key, epoch),
    )
    if latest is not None and latest[0]:
        # Unused rows are deleted, but not that of a lease held for a month. SKIP LOCKED, because two transactions of
        # this holder would wait for each other.
        _fetch_row(
            connection,
            f"UPDATE {leases} SET used_at = clock_timestamp() WHERE key = "  # noqa: S608
            f"(SELECT key FROM {leases} {where} FOR NO KEY UPDATE SKIP LOCKED) RETURNING 1",
            (key, epoch),
        )
    connection = connection or database.connection()
    # Read after the statement, because most drivers begin a transaction with the first one.
    status = getattr(getattr(connection, "info", None), "transaction_status", None)
    if status == TRANSACTION_STATUS_IDLE:
        raise HousekeepingError(f"lease {key!r}: fence() was called outside of a transaction")
    if latest is None:
        # The row can also be missing because the lease was neither acquired nor fenced for a long time.
        raise LeaseLost(f"lease {key!r} has a newer holder; epoch {epoch} is outdated")


def _fetch_row(connection: Connection | None, query: str, parameters: tuple[Any, ...]) -> Any:
    if connection is None:
        return database.execute_sql(query, parameters).fetchone()
    cursor = connection.cursor()
    cursor.execute(query, parameters)
    row = cursor.fetchone()
    cursor.close()
    return row


def _unavailable(error: PeeweeException) -> HousekeepingError | None:
    code = sqlstate(error)
    if code in _SCHEMA_MISSING:
        return SchemaMissing(f"{error_line(error)}; run: housekeeping init")
    # An error without a code does not come from the server: it was not reached, or the connection broke.
    if code is None or code.startswith("08") or code in _NOT_WRITABLE:
        return DatabaseUnavailable(f"PostgreSQL did not answer: {error_line(error)}")
    return None


@contextmanager
def _restore_connection_state() -> Iterator[None]:
    """Close the thread's connection afterwards if it had none."""
    closed = database.is_closed()
    try:
        yield
    finally:
        if closed and not database.is_closed():
            database.close()
