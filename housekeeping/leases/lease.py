"""Exclusive leases: a named lock with an owner and a ttl, which frees itself when its holder dies."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from types import TracebackType
from typing import Final

import redis
from psycopg2.extensions import TRANSACTION_STATUS_INERROR, TRANSACTION_STATUS_INTRANS

from housekeeping.core.errors import (
    DatabaseUnavailable,
    DeclarationError,
    HousekeepingError,
    LeaseHeld,
    LeaseLost,
    RedisUnavailable,
)
from housekeeping.core.redis_client import shared_redis
from housekeeping.core.telemetry import metrics
from housekeeping.core.thread_interrupt import LostLease, interrupter, retract
from housekeeping.database.connection import database
from housekeeping.leases.fencing import Connection, DatabaseNotConfigured, acquire_epoch, check_epoch
from housekeeping.leases.lease_token import holder_of, new_token
from housekeeping.leases.renewal import Renewal, elapsed, renewals, safe_until
from housekeeping.leases.store import LeaseStore as LeaseStore
from housekeeping.leases.store import RedisLeaseStore as RedisLeaseStore
from housekeeping.leases.store import release_with_retries

logger = logging.getLogger(__name__)

#: Below this a lease cannot be renewed in time (docs/reference/actor-options.md).
SHORTEST_TTL: Final = timedelta(seconds=3)


#: Of the message at work; set by the middleware.
current_lease: Final[ContextVar[ExclusiveLease | None]] = ContextVar("current_lease", default=None)


def fence(connection: Connection | None = None) -> None:
    """Let the open database transaction commit only while nobody has taken the actor's lease since; call it last.

    ::

        @dramatiq.actor(exclusive_lease={"key": "balances", "ttl": timedelta(minutes=10)})
        def settle() -> None:
            with database.atomic():
                write_balances()
                housekeeping.fence()

    For the parameter and what it raises see `ExclusiveLease.fence`.

    Raises:
      HousekeepingError: Also where no message of an actor with an ``exclusive_lease`` is at work.
    """
    lease = current_lease.get()
    if lease is None:
        raise HousekeepingError("fence() is for the run of an actor with an exclusive_lease, and there is none")
    lease.fence(connection)


def _in_transaction() -> bool:
    if database.obj is None or database.is_closed():
        return False
    # The driver knows of a transaction begun by hand, too.
    status = database.connection().info.transaction_status
    return database.in_transaction() or status in (TRANSACTION_STATUS_INTRANS, TRANSACTION_STATUS_INERROR)


class ExclusiveLease:
    """A lease of one key: at most one holder at a time, across all processes and machines.

    ::

        with ExclusiveLease("reports/nightly", timedelta(minutes=10)) as lease:
            for page in pages:
                lease.check()
                with database.atomic():
                    publish(page)
                    lease.fence()

    Parameters:
      key: Its name, shared with actors' ``exclusive_lease={"key": ...}``.
      ttl: How long it outlives a holder that died; at least 3 s.
      client: A Redis client or `LeaseStore`; the installed application's Redis unless said.
      retries: How often `with` tries again while somebody else holds it.
      sleep: Seconds between the tries, or a callable of the number of tries so far.
      with_epoch: Whether each acquisition takes an epoch for `fence` where a database is configured; False for
        whoever does that himself.
      worker: Whose run it is for, for those who look who holds it; that of the message at work unless said.

    Raises:
      DeclarationError: When the ttl is too short to be renewed in time.
    """

    def __init__(
        self,
        key: str,
        ttl: timedelta,
        client: redis.Redis | LeaseStore | None = None,
        retries: int = 0,
        sleep: float | Callable[[int], float] = 0.1,
        *,
        with_epoch: bool = True,
        worker: str | None = None,
    ) -> None:
        if not isinstance(ttl, timedelta) or ttl < SHORTEST_TTL:
            raise DeclarationError(f"lease {key!r}: ttl is {ttl!r}; it should be a timedelta of at least 3 seconds")
        self.key = key
        self.ttl = ttl
        self._retries = retries
        self._sleep = sleep
        self._token: str | None = None
        self._asked_at = 0.0
        self._pid = os.getpid()
        self._kept: Renewal | None = None
        self._interrupting = False
        self._with_epoch = with_epoch
        self._worker = worker
        self._epoch: int | None = None
        self._why_no_epoch: HousekeepingError | None = None
        if client is None:
            client = shared_redis.get()
        self._store: LeaseStore = (
            RedisLeaseStore(client, shared_redis.namespace) if isinstance(client, redis.Redis) else client
        )

    def try_obtain(self) -> str | None:
        """Take the lease; returns the token, None when it is held elsewhere (by this very object, too).

        Raises:
          HousekeepingError: Inside an open database transaction: the lease would outlive its rollback.
          LeaseLost: The database took so long that the lease was over.
          peewee.PeeweeException: The database is there but gave no epoch, as while a transaction of the last
            holder does not end; the lease is given back.
          RedisUnavailable: Redis did not answer; the lease may be ours until its ttl is over, unused.
        """
        if _in_transaction():
            raise HousekeepingError(f"lease {self.key!r} cannot be taken inside an open database transaction")
        token = new_token(self._worker)
        asked_at = elapsed()
        whose = holder_of(token).worker or ""
        metrics.LEASES_REQUESTED.add(whose)
        if self._store.obtain(self.key, token, self.ttl) != token:
            metrics.LEASES_HELD.add(whose)
            return None
        self._token, self._asked_at, self._pid = token, asked_at, os.getpid()
        if self._with_epoch:
            self._take_epoch(token)
        return token

    def _take_epoch(self, token: str) -> None:
        self._epoch, self._why_no_epoch = None, None
        try:
            self._epoch = acquire_epoch(self.key, token)
        except HousekeepingError as reason:
            # What needs no database must not stand still without it; what does is told by `fence`.
            self._why_no_epoch = reason
            if not isinstance(reason, DatabaseNotConfigured):
                logger.warning("Lease %r has no epoch: %s", self.key, reason)
        except BaseException:
            self._give_back()
            raise
        if safe_until(self._asked_at, self.ttl.total_seconds()) < elapsed():
            # Others may have begun meanwhile, and this epoch would be a late one.
            self._give_back()
            raise LeaseLost(f"lease {self.key!r} was lost while its epoch was taken")

    def _give_back(self) -> None:
        try:
            self.cancel()
        except RedisUnavailable as error:
            logger.warning("Lease %r stays until its ttl is over: %s", self.key, error)

    def take_over(self, owner: str) -> str | None:
        """Take it from a holder that is known to be gone; as `try_obtain`.

        Whoever calls it must know, and must be safe from a holder that was only asleep: sweeps are, by their epoch.
        """
        self._store.release(self.key, owner)
        return self.try_obtain()

    def renew(self) -> bool:
        """Back to the full ttl; False when it is no longer ours."""
        return self._token is not None and self._ours() and self._store.renew(self.key, self._token, self.ttl)

    def cancel(self) -> bool:
        """Give it back, in up to three tries; False when it was no longer ours."""
        token, self._token, self._epoch = self._token, None, None
        lost = self._kept is not None and self._kept.lost
        if self._kept is not None:
            renewals.stop(self._kept)
            self._kept = None
            if self._interrupting:
                retract(LostLease)
        if token is None or not self._ours():
            return False
        ours = release_with_retries(self._store, self.key, token)
        if lost or not ours:
            metrics.LEASES_LOST.add(holder_of(token).worker or "")
        return ours

    def exists(self) -> bool:
        """Whether anybody holds it."""
        return self._store.owner(self.key) is not None

    def owner(self) -> str | None:
        """The holder's token."""
        return self._store.owner(self.key)

    def remaining(self) -> timedelta | None:
        """Until it expires unless it is renewed; None when nobody holds it."""
        return self._store.remaining(self.key)

    def held_for(self) -> timedelta | None:
        """For how long its holder has had it, by the clocks of the two machines; None when unknown."""
        return holder_of(self.owner()).held_for

    def start_renewal(self, *, interrupting: bool = False) -> None:
        """Renew in the background from now until `cancel`.

        Parameters:
          interrupting: Raise `LostLease` in the calling thread when it is lost, inside of `run_interruptibly` only.
        """
        if self._kept is None:
            self._interrupting = interrupting
            on_lost = interrupter(LostLease) if interrupting else None
            self._kept = renewals.start(f"lease {self.key!r}", self.renew, self.ttl, self._asked_at, on_lost)

    def _ours(self) -> bool:
        # A forked child has a copy of its parent's token, and must not give the lease back for it.
        return self._pid == os.getpid()

    @property
    def lost(self) -> bool:
        """Whether it expired, was released by hand, or could not be renewed in time; asks nobody."""
        return self._kept is None or self._kept.lost

    def check(self) -> None:
        """Return while the lease is surely ours.

        Raises:
          LeaseLost: When it is not, see `lost`.
        """
        if self.lost:
            raise LeaseLost(f"lease {self.key!r} was lost")

    def fence(self, connection: Connection | None = None) -> None:
        """Let the open database transaction commit only while nobody has taken the lease since; call it last.

        Whoever takes the lease next waits until this transaction is over, so that of all commits under one key
        none comes from a holder that slept past its ttl.

        Parameters:
          connection: The application's own, of any driver with ``%s`` parameters, to the database of
            ``HOUSEKEEPING_DATABASE_URL``; the library's unless given.

        Raises:
          LeaseLost: The lease has passed on; let this roll the transaction back.
          DatabaseUnavailable: The database was away when the lease was taken, so that it has no epoch.
          HousekeepingError: Outside of a transaction, without a database, or without the lease.
        """
        if self._kept is not None:
            self.check()
        if self._epoch is None:
            why = self._why_no_epoch
            raise (DatabaseUnavailable if isinstance(why, DatabaseUnavailable) else HousekeepingError)(
                f"lease {self.key!r} has no epoch to be fenced by: {why or 'it is not held'}"
            )
        check_epoch(self.key, self._epoch, connection)

    def __enter__(self) -> ExclusiveLease:
        tries = 0
        while self.try_obtain() is None:
            if tries >= self._retries:
                raise LeaseHeld(f"lease {self.key!r} is held elsewhere")
            tries += 1
            time.sleep(self._sleep(tries) if callable(self._sleep) else self._sleep)
        self.start_renewal()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lost = self.lost
        try:
            ours = self.cancel()
        except RedisUnavailable as unreachable:
            # Held to the end all the same; it expires by itself.
            logger.warning("Lease %r could not be given back: %s", self.key, unreachable)
            ours = True
        if (lost or not ours) and error is None:
            raise LeaseLost(f"lease {self.key!r} was lost before the end of its block")
