"""Epoch of one lease holder: issued when it begins if an earlier holder has one, else with its first fence."""

from __future__ import annotations

import logging
from collections.abc import Callable

from psycopg2.extensions import TRANSACTION_STATUS_INERROR, TRANSACTION_STATUS_INTRANS

from housekeeping.core.errors import DatabaseUnavailable, HousekeepingError
from housekeeping.core.settings import MAIN
from housekeeping.database.connection import database
from housekeeping.leases.fencing import (
    Connection,
    DatabaseNotConfigured,
    Fence,
    acquire_epoch,
    check_epoch,
    first_epoch,
    forget_epoch,
    is_latest,
    needs_epoch,
)

logger = logging.getLogger(__name__)


class HolderEpoch:
    """Epoch of the holder with this token, in the ledger of one database.

    Attributes:
      fence: The epoch; None while the holder has none.
    """

    def __init__(self, key: str, token: str, database_name: str = MAIN) -> None:
        self.fence: Fence | None = None
        self._key = key
        self._token = token
        self._database = database_name
        self._began_without = True
        self._has_fenced = False
        self._error: HousekeepingError | None = None

    def acquire(self) -> None:
        """Issue the epoch if an earlier holder has one.

        Raises:
          peewee.PeeweeException: PostgreSQL answered but issued no epoch, for example because a transaction of the last
            holder does not end.
        """
        try:
            with database.using(self._database):
                self._began_without = not needs_epoch(self._key)
                if not self._began_without:
                    self.fence = Fence(self._key, acquire_epoch(self._key, self._token), self._token)
        except HousekeepingError as error:
            # Work that needs no database continues. Work that needs it gets the error from `check`.
            self._error = error
            if not isinstance(error, DatabaseNotConfigured):
                logger.warning("Lease %r has no epoch: %s", self._key, error)

    def check(self, is_held: Callable[[], bool], connection: Connection | None) -> None:
        """Let the open transaction commit only if the lease has no newer holder.

        Parameters:
          is_held: Returns whether Redis still has the lease of this holder.

        Raises: As `ExclusiveLease.fence`.
        """
        if self._error is not None:
            kind = DatabaseUnavailable if isinstance(self._error, DatabaseUnavailable) else HousekeepingError
            raise kind(f"lease {self._key!r} has no epoch: {self._error}")
        with database.using(self._database):
            if self.fence is not None and not self._began_without:
                check_epoch(self.fence, connection)
            # A rollback removes a first epoch, so it is issued again.
            elif self.fence is None or not is_latest(self.fence, connection):
                self.fence = Fence(self._key, first_epoch(self._key, self._token, is_held, connection), self._token)
        self._has_fenced = True

    def forget(self) -> None:
        """Delete the epoch if no fence used it, so that the next holders need none."""
        if self.fence is not None and not self._has_fenced and not in_transaction():
            with database.using(self._database):
                forget_epoch(self.fence)


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
