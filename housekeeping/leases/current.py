"""Lease of the current message, and `housekeeping.fence`, which checks it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from housekeeping.core.errors import HousekeepingError
from housekeeping.leases.fencing import Connection
from housekeeping.leases.lease import ExclusiveLease

#: Lease of the current message; set by the middleware.
current_lease: Final[ContextVar[ExclusiveLease | None]] = ContextVar("current_lease", default=None)


def fence(connection: Connection | None = None) -> None:
    """Let the open transaction commit only if the actor's lease has no newer holder; call it last.

    ::

        @dramatiq.actor(exclusive_lease={"key": "balances", "ttl": timedelta(minutes=10)})
        def settle() -> None:
            with database.atomic():
                write_balances()
                housekeeping.fence()

    See `ExclusiveLease.fence` for the parameter and all errors.

    Raises:
      HousekeepingError: Also outside of a message of an actor with an ``exclusive_lease``.
    """
    lease = current_lease.get()
    if lease is None:
        raise HousekeepingError("fence() was called outside of a message of an actor with an exclusive_lease")
    lease.fence(connection)
