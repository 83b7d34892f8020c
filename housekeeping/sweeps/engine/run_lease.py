"""The lease a run holds: taken, inherited from a run that is gone, given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.leases.lease_token import holder_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import runs

logger = named_logger(__name__)


@contextmanager
def held(
    sweep: Sweep, argument: Any, message_id: str | None, without: Callable[[ExclusiveLease], NoReturn]
) -> Iterator[tuple[ExclusiveLease, str] | None]:
    """The sweep's lease with its token, for as long as the run; null when it needs none.

    Parameters:
      without: Called with a lease that somebody else holds; raises what ends the run.

    Raises:
      RedisUnavailable: Nothing is held then.
    """
    terms = sweep.lease
    if terms is None:
        yield None
        return
    # Its epoch is taken with the run's row, in one transaction.
    lease = ExclusiveLease(terms.key_for(argument), terms.ttl, with_epoch=False, worker=sweep.name)
    token = lease.try_obtain() or _inherited(lease, sweep.name, message_id)
    if token is None:
        without(lease)
    lease.start_renewal(interrupting=True)
    try:
        yield lease, token
    finally:
        try:
            lease.cancel()
        except RedisUnavailable as error:
            # The work is done or not, whatever becomes of its lease; it expires by itself.
            logger.warning("Lease could not be given back", lease=lease.key, error=str(error))


def tell_who_holds(lease: ExclusiveLease) -> None:
    """Log that the lease is held elsewhere, and for how long."""
    held_for = lease.held_for() or timedelta()
    logger.info("Lease is held elsewhere", lease=lease.key, held_for_s=round(held_for.total_seconds(), 1))


def _inherited(lease: ExclusiveLease, worker: str, message_id: str | None) -> str | None:
    """Take the lease over from a run that ended or died without giving it back; None when its holder lives."""
    owner = lease.owner()
    # Application code and plain actors may hold the same key; of theirs the ledger knows nothing.
    if owner is None or holder_of(owner).worker != worker:
        return None
    if not (_is_of(message_id, owner) or runs.holder_is_gone(worker, lease.key, owner)):
        return None
    logger.info("Lease is taken over from a run that is gone", lease=lease.key)
    return lease.take_over(owner)


def _is_of(message_id: str | None, owner: str) -> bool:
    """Whether an earlier attempt at this very message holds it, that never began or has ended."""
    mine = message_id is not None and holder_of(owner).message_id == message_id
    return mine and not runs.is_unfinished(str(message_id))
