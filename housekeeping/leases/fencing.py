"""Fencing tokens of leases, called epochs: a number that increases with each holder that fences, stored in PostgreSQL.

Redis decides who may begin. The epoch decides, within the transaction itself, who may still commit. Most holders never
call `fence`, so a holder gets its epoch only with its first fence. If an earlier holder has an epoch, the next one gets
a higher epoch before it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol

from peewee import SQL, BigIntegerField, PeeweeException, TextField
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from housekeeping.core.errors import (
    DatabaseUnavailable,
    HousekeepingError,
    LeaseLost,
    SchemaMissing,
)
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry.context import current_message
from housekeeping.database.connection import BaseModel, database, sqlstate
from housekeeping.database.times import UtcDateTimeField

#: Codes of a missing schema, table or column, and of missing rights.
_SCHEMA_MISSING: Final = ("3F000", "42P01", "42501", "42703")
#: Codes of a server that accepts no commits for now: read-only, shutting down, starting, too many connections.
_NOT_WRITABLE: Final = ("25006", "57P01", "57P02", "57P03", "53300")

#: The column's default, because an identity column needs no right on its sequence.
_NEXT_EPOCH: Final = SQL("DEFAULT")
_NOW: Final = SQL("clock_timestamp()")
#: Advisory lock of a key: shared for transactions with a first fence, exclusive for the next holder.
_LOCK: Final = "hashtextextended('housekeeping lease ' || %s, 0)"
#: This holder began when there was no epoch, so an existing one belongs to a later holder.
_UNLESS_ISSUED: Final = "ON CONFLICT (key) DO NOTHING RETURNING epoch"


class DatabaseNotConfigured(HousekeepingError):
    """No database is configured, so there are no epochs."""


class Lease(BaseModel):
    """Latest epoch of a lease, and the token of its holder.

    All keys share one sequence. So a row can be deleted, and the next epoch of its key is still higher. `used_at` is
    the time of the last acquisition, or of the last fence, accurate to a day.
    """

    key = TextField(primary_key=True)
    epoch = BigIntegerField()
    holder = TextField()
    used_at = UtcDateTimeField()

    class Meta:
        table_name = "leases"
        schema = "housekeeping"


class Fence(NamedTuple):
    """Epoch of a holder, which PostgreSQL checks before a commit.

    The token is checked as well: after a failover to a replica that had not received the last acquisitions, the new
    primary issues their epochs again.

    Attributes:
      key: The key of the lease.
      epoch: The holder's epoch.
      holder: The holder's token.
    """

    key: str
    epoch: int
    holder: str


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


def needs_epoch(key: str) -> bool:
    """Return whether an earlier holder of the key has an epoch, so that the next one needs a higher one to begin.

    One round trip that writes nothing. It waits for open transactions that issue a `first_epoch`.

    Raises: See `acquire_epoch`.
    """
    with _translate_errors():
        # Two statements: the second one sees what was committed while the first one waited.
        query = f"SELECT pg_advisory_xact_lock({_LOCK}); SELECT epoch, holder, used_at FROM {_leases()} WHERE key = %s"  # noqa: S608
        return database.execute_sql(query, (key, key)).fetchone() is not None


def acquire_epoch(key: str, token: str) -> int:
    """Issue the next epoch of the key, in a transaction of its own.

    Raises:
      DatabaseNotConfigured, DatabaseUnavailable, SchemaMissing: If no epochs are available.
      peewee.PeeweeException: For any other error, for example if a transaction of the last holder does not end.
    """
    with _translate_errors(), database.atomic():
        return next_epoch(key, token)


def first_epoch(key: str, token: str, is_held: Callable[[], bool], connection: Connection | None = None) -> int:
    """Issue the first epoch of the key in the current transaction, for a holder that began without one.

    Parameters:
      is_held: Returns whether Redis still has the holder's lease. It is called while the next holder must wait for
        this transaction (see `needs_epoch`), so its answer stays true.

    Raises:
      LeaseLost: If another holder has begun. The transaction must be rolled back.
      HousekeepingError: Outside of a transaction.
    """
    _fetch_row(connection, f"SELECT pg_advisory_xact_lock_shared({_LOCK})", (key,))
    _refuse_outside_of_transaction(key, connection)
    issued = is_held() and _fetch_row(
        connection,
        f"INSERT INTO {_leases()} (key, holder, used_at) VALUES (%s, %s, clock_timestamp()) {_UNLESS_ISSUED}",  # noqa: S608
        (key, token),
    )
    if not issued:
        raise LeaseLost(f"lease {key!r} has a newer holder, or was lost before its first fence")
    epoch: int = issued[0]
    return epoch


def forget_epoch(fence: Fence) -> None:
    """Delete the epoch of a holder that ended without a fence; without a row, the next holders need no epoch.

    Epochs of earlier holders stay invalid, because they have no row. Errors are ignored; the row then stays.
    """
    try:
        with _translate_errors():
            Lease.delete().where(is_of(*fence)).execute()
    except (HousekeepingError, PeeweeException):
        return


def is_of(key: Any, epoch: Any, holder: Any) -> Any:
    """Return the condition that this holder still has the lease."""
    return (Lease.key == key) & (Lease.epoch == epoch) & (Lease.holder == holder)


def check_epoch(fence: Fence, connection: Connection | None = None) -> None:
    """Check that the holder is still the latest. The next holder then waits until the current transaction ends.

    Parameters:
      connection: The connection of the transaction; by default the library's own.

    Raises:
      LeaseLost: If there is a newer holder. The transaction must be rolled back.
      HousekeepingError: Outside of a transaction, where the check would protect nothing.
    """
    if not is_latest(fence, connection):
        # The row can also be missing because the lease was neither acquired nor fenced for a long time.
        raise LeaseLost(f"lease {fence.key!r} has a newer holder; epoch {fence.epoch} is outdated")


def is_latest(fence: Fence, connection: Connection | None = None) -> bool:
    """Return whether the holder is still the latest. If so, the next holder waits until the transaction ends."""
    where = "WHERE key = %s AND epoch = %s AND holder = %s"
    # FOR SHARE, so that the epoch of the next holder waits until this transaction ends.
    latest = _fetch_row(
        connection,
        f"SELECT used_at < clock_timestamp() - interval '1 day' FROM {_leases()} {where} FOR SHARE",  # noqa: S608
        fence,
    )
    if latest is not None and latest[0]:
        # Keeps the row of a lease that is held for long from being deleted as unused. SKIP LOCKED, because two
        # transactions of this holder would wait for each other.
        _fetch_row(
            connection,
            f"UPDATE {_leases()} SET used_at = clock_timestamp() WHERE key = "  # noqa: S608
            f"(SELECT key FROM {_leases()} {where} FOR NO KEY UPDATE SKIP LOCKED) RETURNING 1",
            fence,
        )
    _refuse_outside_of_transaction(fence.key, connection)
    return latest is not None


def _refuse_outside_of_transaction(key: str, connection: Connection | None) -> None:
    connection = connection or database.connection()
    # Read after a statement, because most drivers begin a transaction with the first one.
    status = getattr(getattr(connection, "info", None), "transaction_status", None)
    if status == TRANSACTION_STATUS_IDLE:
        raise HousekeepingError(f"lease {key!r}: fence() was called outside of a transaction")


def _leases() -> str:
    return f'"{Lease._meta.schema}".leases'


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
def _translate_errors() -> Iterator[None]:
    """Translate errors of the database. Close a connection that the block opened, except in a worker's thread."""
    if database.obj is None:
        which = "no database is configured (HOUSEKEEPING_DATABASE_URL)"
        if database.selected != MAIN:
            which = f"there is no database {database.selected!r} (HOUSEKEEPING_DATABASES)"
        raise DatabaseNotConfigured(which)
    close = database.is_closed() and current_message.get() is None
    try:
        yield
    except PeeweeException as error:
        reason = _unavailable(error)
        if reason is None:
            raise
        raise reason from error
    finally:
        if close and not database.is_closed():
            database.close()
