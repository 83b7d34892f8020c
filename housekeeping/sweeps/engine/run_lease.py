"""Lease of a run: acquired, taken over from a dead run, released."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.leases.lease_token import holder_of
from housekeeping.sweeps.engine.run_context import RunRequest
from housekeeping.sweeps.ledger import run_queries

logger = named_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunLease:
    """Lease of a run.

    Attributes:
      lease: None for a sweep that needs no lease.
      token: None while another holder has the lease.
    """

    lease: ExclusiveLease | None = None
    token: str | None = None

    @property
    def is_held_elsewhere(self) -> bool:
        return self.lease is not None and self.token is None

    @property
    def key_and_token(self) -> tuple[str, str] | None:
        return None if self.lease is None or self.token is None else (self.lease.key, self.token)

    def check(self) -> None:
        """Raise LeaseLost unless the lease is still held."""
        if self.lease is not None:
            self.lease.check()


@contextmanager
def run_lease(request: RunRequest) -> Iterator[RunLease]:
    """Hold the sweep's lease within the block, if it is free or its holder is dead.

    Raises:
      RedisUnavailable: Nothing is held.
    """
    config = request.sweep.lease
    if config is None:
        yield RunLease()
        return
    # Without an epoch: the run gets one together with its row, in one transaction.
    key = config.key_for(request.argument)
    lease = ExclusiveLease(key, config.ttl, with_epoch=False, worker=request.sweep.name)
    token = lease.try_obtain() or _take_over(lease, request.sweep.name, request.message_id)
    if token is None:
        held_for = lease.held_for() or timedelta()
        logger.info("Lease is held elsewhere", lease=lease.key, held_for_s=round(held_for.total_seconds(), 1))
        yield RunLease(lease)
        return
    lease.start_renewal(interrupting=True)
    try:
        yield RunLease(lease, token)
    finally:
        try:
            lease.cancel()
        except RedisUnavailable as error:
            # The outcome of the run is the same; the lease expires.
            logger.warning("Lease could not be released", lease=lease.key, error=str(error))


def _take_over(lease: ExclusiveLease, worker: str, message_id: str | None) -> str | None:
    """Take the lease over from a run that ended or died without releasing it. Return None while its holder is alive."""
    owner = lease.owner()
    # Application code and plain actors may hold the same key. The ledger does not have their runs.
    if owner is None or holder_of(owner).worker != worker:
        return None
    if not (_is_of(message_id, owner) or run_queries.holder_is_gone(worker, lease.key, owner)):
        return None
    logger.info("Lease is taken over from a dead run", lease=lease.key)
    return lease.take_over(owner)


def _is_of(message_id: str | None, owner: str) -> bool:
    """Return whether the holder is an earlier attempt at this message that never began or has ended."""
    is_same_message = message_id is not None and holder_of(owner).message_id == message_id
    return is_same_message and not run_queries.is_unfinished(str(message_id))
