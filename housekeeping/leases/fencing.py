"""Epochs: a number for each acquisition of a lease, higher than all before it for its key, kept by PostgreSQL.

Redis says who may begin; the epoch says, in the transaction itself, who may still commit.
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
from housekeeping.database.connection import BaseModel, UtcDateTimeField, database, sqlstate

#: The schema or its table is not there, or not for this user; or a column of this release is not.
_NOT_MADE: Final = ("3F000", "42P01", "42501", "42703")
#: Nobody can commit anything there for now: read-only, shutting down, starting, full.
_OUT_OF_ORDER: Final = ("25006", "57P01", "57P02", "57P03", "53300")


#: The column's own: an identity needs no right on its sequence.
_NEXT_NUMBER: Final = SQL("DEFAULT")
_NOW: Final = SQL("clock_timestamp()")


class DatabaseNotConfigured(HousekeepingError):
    """No database is configured, so that there are no epochs."""


class Lease(BaseModel):
    """The highest epoch at which a lease was ever held, and the token of the run that has it.

    Epochs are numbers of one sequence for all keys, so that a row may go and the next one's epoch is higher still.
    `used_at` is when the lease was last taken, or to the day, last fenced.
    """

    key = TextField(primary_key=True)
    epoch = BigIntegerField()
    holder = TextField()
    used_at = UtcDateTimeField()

    class Meta:
        table_name = "leases"
        schema = "housekeeping"


class Connection(Protocol):
    """An application's own connection to the same database, as Python's database drivers have it."""

    def cursor(self) -> Any:
        """Whose ``execute`` takes ``%s`` parameters."""


def next_epoch(key: str, token: str) -> int:
    """A number higher than every one before it for this key, taken in the transaction at hand.

    Waits for transactions of the last holder that have checked their epoch and are not over.
    """
    # Locked before the number is drawn: another one's, drawn earlier, must not be written later.
    before = Lease.select(Lease.epoch).where(Lease.key == key).for_update().tuples().first()
    taken = {Lease.epoch: _NEXT_NUMBER, Lease.holder: token, Lease.used_at: _NOW}
    if before is None:
        return _only(
            Lease.insert({Lease.key: key, **taken}).on_conflict(conflict_target=[Lease.key], update=taken),
        )
    while True:
        epoch = _only(Lease.update(taken).where(Lease.key == key))
        # An older release, or a release by hand, has counted on without the sequence.
        if epoch > before[0]:
            return epoch


def _only(query: Any) -> int:
    epoch: int = next(iter(query.returning(Lease.epoch).tuples().execute()))[0]
    return epoch


def acquire_epoch(key: str, token: str) -> int:
    """`next_epoch` in a transaction of its own.

    Raises:
      NoDatabase, DatabaseUnavailable, SchemaMissing: When none can be had.
      peewee.PeeweeException: When it can be had but was not, as when the last holder's transaction does not end.
    """
    if database.obj is None:
        raise DatabaseNotConfigured("no database is configured (HOUSEKEEPING_DATABASE_URL)")
    with _connection_left_as_found():
        try:
            with database.atomic():
                return next_epoch(key, token)
        except PeeweeException as error:
            reason = _why_none(error)
            if reason is None:
                raise
            raise reason from error


def check_epoch(key: str, epoch: int, connection: Connection | None = None) -> None:
    """Let the transaction at hand commit only if no higher epoch was taken; the next one waits until it is over.

    Parameters:
      connection: The application's own, in whose transaction it is asked; the library's unless given.

    Raises:
      LeaseLost: When there is a higher one: the transaction must be rolled back.
      HousekeepingError: Outside of a transaction, where it would guard nothing.
    """
    leases = f'"{Lease._meta.schema}".leases'
    where = "WHERE key = %s AND epoch = %s"
    # FOR SHARE: a new holder's epoch waits for this transaction, so that none commits behind its back.
    newest = _fetched(
        connection,
        f"SELECT used_at < clock_timestamp() - interval '1 day' FROM {leases} {where} FOR SHARE",  # noqa: S608
        (key, epoch),
    )
    if newest is not None and newest[0]:
        # Else a lease held for a month would be taken for forgotten. Skipped where another transaction of this
        # holder has the row in hand: each would wait for the other.
        _fetched(
            connection,
            f"UPDATE {leases} SET used_at = clock_timestamp() WHERE key = "  # noqa: S608
            f"(SELECT key FROM {leases} {where} FOR NO KEY UPDATE SKIP LOCKED) RETURNING 1",
            (key, epoch),
        )
    connection = connection or database.connection()
    # Asked after the statement: most drivers begin a transaction with their first one.
    status = getattr(getattr(connection, "info", None), "transaction_status", None)
    if status == TRANSACTION_STATUS_IDLE:
        raise HousekeepingError(f"lease {key!r}: its fence guards a transaction, and there is none")
    if newest is None:
        # Or its row is gone, because it was neither taken nor fenced for so long that it was forgotten.
        raise LeaseLost(f"lease {key!r} has been taken by another holder since epoch {epoch}")


def _fetched(connection: Connection | None, query: str, parameters: tuple[Any, ...]) -> Any:
    if connection is None:
        return database.execute_sql(query, parameters).fetchone()
    cursor = connection.cursor()
    cursor.execute(query, parameters)
    row = cursor.fetchone()
    cursor.close()
    return row


def _why_none(error: PeeweeException) -> HousekeepingError | None:
    code = sqlstate(error)
    if code in _NOT_MADE:
        return SchemaMissing(f"{error_line(error)}; run: housekeeping init")
    # Without a code the server had no say: it was not reached, or the connection broke.
    if code is None or code.startswith("08") or code in _OUT_OF_ORDER:
        return DatabaseUnavailable(f"PostgreSQL did not answer: {error_line(error)}")
    return None


@contextmanager
def _connection_left_as_found() -> Iterator[None]:
    """Open no connection for good in a thread that has none."""
    closed = database.is_closed()
    try:
        yield
    finally:
        if closed and not database.is_closed():
            database.close()
