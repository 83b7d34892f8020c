"""Exclusive leases: named locks with an owner and a ttl, which expire if their holder dies.

Redis decides who may begin; PostgreSQL does if it is the only server. A fencing token, called epoch, decides within the
transaction who may still commit. It is a number in PostgreSQL that increases with each holder of a fenced lease, who
gets it before beginning. Leases without fencing need no epoch. An actor checks its lease by `housekeeping.fence`. A run
of a sweep checks its epoch in the statement of each batch, see `ledger.runs.advance_cte`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Protocol

import redis
from psycopg2.extensions import TRANSACTION_STATUS_IDLE, TRANSACTION_STATUS_INERROR, TRANSACTION_STATUS_INTRANS

from housekeeping.core import telemetry
from housekeeping.core.errors import (
    DeclarationError,
    HousekeepingError,
    LeaseHeld,
    LeaseLost,
    ServerUnavailable,
)
from housekeeping.core.interrupts import LostLease, interrupter, retract
from housekeeping.core.redis import retry_on_outage, shared_redis
from housekeeping.core.settings import MAIN
from housekeeping.core.threads import in_thread
from housekeeping.database.connection import database
from housekeeping.leases.renewal import (
    SHORTEST_TTL,
    RedisLeaseStore,
    Renewal,
    elapsed,
    renewals,
    safe_until,
    shared_lease_store,
)
from housekeeping.ledger.leases import Fence, LeaseStore, holder_of, lease_statement, new_token, next_epoch, worker_of
from housekeeping.ledger.schema import LeaseRow

logger = logging.getLogger(__name__)


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
    with lease_statement(), database.atomic():
        return next_epoch(key, token)


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


class _BlockTask:
    """The current task, inside of an ``async with`` block that ends if its lease is lost."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._before = task.cancelling()
        self._canceled = self._ended = False

    def cancel_soon(self) -> None:
        """Cancel the task; called by any thread."""
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if not self._ended:
            self._canceled = True
            self._task.cancel()

    def end(self) -> bool:
        """Cancel the task no more, and return whether it was canceled here and nowhere else."""
        self._ended = True
        return self._canceled and self._task.uncancel() <= self._before


class ExclusiveLease:
    """Lease of one key, with at most one holder across all processes and machines.

    ::

        with ExclusiveLease("reports/nightly", timedelta(minutes=10), fenced=True) as lease:
            for page in pages:
                lease.check()
                with database.atomic():
                    publish(page)
                    lease.fence()

    ``async with`` does the same without blocking the event loop of asyncio. It cancels its block as soon as the lease
    is lost, and then raises LeaseLost. A task that is canceled while it acquires the lease releases it again. Within
    both blocks `housekeeping.fence` checks the lease, also in threads that get the context variables, such as those of
    `asyncio.to_thread`.

    Parameters:
      key: Its name, shared with actors' ``exclusive_lease={"key": ...}``.
      ttl: Time until the lease of a dead holder expires; at least 3 s.
      client: A Redis client or `LeaseStore`; by default the Redis of the installed application, or PostgreSQL if it is
        the only server.
      retries: Number of retries of `with` while the lease has another holder.
      sleep: Seconds between the tries, or a callable of the number of tries so far.
      fenced: Whether holders may call `fence`. They then get an epoch from the database before they begin. All holders
        of a key should, because one without an epoch does not keep an earlier one from committing.
      worker: Name of the worker, shown to people who look for the holder; by default that of the current message.
      database: Name of the database whose transactions `fence` protects. All holders of a key name the same one.

    Raises:
      DeclarationError: If the ttl is too short to be renewed in time.
    """

    def __init__(
        self,
        key: str,
        ttl: timedelta,
        client: redis.Redis | LeaseStore | None = None,
        retries: int = 0,
        sleep: float | Callable[[int], float] = 0.1,
        *,
        fenced: bool = False,
        worker: str | None = None,
        database: str = MAIN,
    ) -> None:
        if not isinstance(ttl, timedelta) or ttl < SHORTEST_TTL:
            raise DeclarationError(f"lease {key!r}: ttl is {ttl!r}; it should be a timedelta of at least 3 seconds")
        self.key = key
        self.ttl = ttl
        self._retries = retries
        self._sleep = sleep
        self._token: str | None = None
        self._requested_at = 0.0
        self._pid = os.getpid()
        self._renewal: Renewal | None = None
        self._interrupting = False
        self._fenced = fenced
        self._worker = worker
        self._database = database
        self._fence: Fence | None = None
        self._outer: ExclusiveLease | None = None
        self._task: _BlockTask | None = None
        if isinstance(client, redis.Redis):
            client = RedisLeaseStore(client, shared_redis.namespace)
        self._store: LeaseStore = client or shared_lease_store()

    def try_obtain(self) -> str | None:
        """Acquire the lease and return its token; None if it has a holder, which can be this object.

        Raises:
          HousekeepingError: Inside an open database transaction, because the lease would outlive its rollback.
          LeaseLost: If the database took so long that the lease expired.
          DatabaseUnavailable, SchemaMissing, peewee.PeeweeException: If PostgreSQL issued no epoch to a fenced lease,
            for example because a transaction of the last holder does not end. The lease is released.
          RedisUnavailable, DatabaseUnavailable: If the store did not answer. The lease may stay without a holder until
            its ttl expires.
        """
        token = self.request()
        return token if self.answered(token, self._store.obtain(self.key, token, self.ttl)) else None

    def request(self) -> str:
        """Return a new token, with which the caller's own script acquires the lease; pass its answer to `answered`.

        Raises:
          HousekeepingError: As `try_obtain`.
        """
        if in_transaction():
            raise HousekeepingError(f"lease {self.key!r} cannot be acquired inside an open database transaction")
        self._requested_at = elapsed()
        token = new_token(self._worker)
        telemetry.LEASES_REQUESTED.add(worker_of(token))
        return token

    def answered(self, token: str, holder: str) -> bool:
        """Use the lease if its holder is the requested token, and return whether it is; raises as `try_obtain`."""
        if holder != token:
            telemetry.LEASES_HELD.add(worker_of(token))
            return False
        self._token, self._pid = token, os.getpid()
        if self._fenced:
            self._acquire_epoch(token)
        return True

    def _acquire_epoch(self, token: str) -> None:
        try:
            with database.using(self._database):
                self._fence = Fence(self.key, acquire_epoch(self.key, token), token)
        except BaseException:
            self._release_or_warn()
            raise
        if safe_until(self._requested_at, self.ttl.total_seconds()) < elapsed():
            # Another holder may have started already, and this epoch would fence it off.
            self._release_or_warn()
            raise LeaseLost(f"lease {self.key!r} expired while its epoch was issued")

    def _release_or_warn(self) -> bool:
        """Release the lease; return False if it was lost. Log a warning if the store does not answer."""
        try:
            return self.cancel()
        except ServerUnavailable as error:
            logger.warning("Lease %r stays until its ttl expires: %s", self.key, error)
            return True

    def take_over(self, owner: str) -> str | None:
        """Release the lease of a dead holder, then `try_obtain`.

        The caller must know that the holder is dead, and be protected if it was only suspended, as sweeps are by their
        epoch.
        """
        self._store.release(self.key, owner)
        return self.try_obtain()

    def renew(self) -> bool:
        """Extend the lease to its full ttl; return False if it is no longer held."""
        return self._token is not None and self._same_process() and self._store.renew(self.key, self._token, self.ttl)

    def cancel(self) -> bool:
        """Release the lease, in up to three tries; return False if it was no longer held."""
        lost = self._renewal is not None and self._renewal.lost
        token = self.give_up()
        if token is None:
            return False
        tries = 0

        def release() -> bool:
            nonlocal tries
            tries += 1
            # If it is free after a try without an answer, that try has released it.
            return self._store.release(self.key, token) or tries > 1

        released = retry_on_outage(release)
        self.count_loss(token, lost=lost or not released)
        return released

    def give_up(self) -> str | None:
        """Stop using the lease and return the token that is still to be released; None if this process has none."""
        token, self._token = self._token, None
        self._fence = None
        if self._renewal is not None:
            renewals.stop(self._renewal)
            self._renewal = None
            if self._interrupting:
                retract(LostLease)
        return token if self._same_process() else None

    @staticmethod
    def count_loss(token: str, *, lost: bool) -> None:
        """Count the lease of a token if it was lost before its release."""
        if lost:
            telemetry.LEASES_LOST.add(worker_of(token))

    def exists(self) -> bool:
        """Return whether the lease has a holder."""
        return self._store.owner(self.key) is not None

    def owner(self) -> str | None:
        """Return the holder's token."""
        return self._store.owner(self.key)

    def remaining(self) -> timedelta | None:
        """Return the time until the lease expires without a renewal; None if it is free."""
        return self._store.remaining(self.key)

    def held_for(self) -> timedelta | None:
        """Return how long its holder has held it, by the clocks of both machines; None if unknown."""
        return holder_of(self.owner()).held_for

    def start_renewal(self, *, interrupting: bool = False, on_lost: Callable[[], object] | None = None) -> None:
        """Renew the lease in the background until `cancel`.

        Parameters:
          interrupting: Whether the lease belongs to the calling thread. `LostLease` is raised there when the lease is
            lost, inside of `run_interruptibly` only, and the renewal stops when the thread has ended.
          on_lost: Called in another thread when the lease is lost, unless it is `interrupting`.
        """
        if self._renewal is None:
            self._interrupting = interrupting
            renew, holder = self.renew, threading.current_thread()
            if interrupting:
                on_lost, renew = interrupter(LostLease), lambda: holder.is_alive() and self.renew()
            self._renewal = renewals.start(f"lease {self.key!r}", renew, self.ttl, self._requested_at, on_lost)

    def _same_process(self) -> bool:
        # A forked child has a copy of its parent's token, and must not release the parent's lease.
        return self._pid == os.getpid()

    @property
    def lost(self) -> bool:
        """Whether the lease expired, was released manually, or was not renewed in time; needs no round trip."""
        return self._renewal is None or self._renewal.lost

    def check(self) -> None:
        """Check that the lease is still held.

        Raises:
          LeaseLost: If it is `lost`.
        """
        if self.lost:
            raise LeaseLost(f"lease {self.key!r} was lost")

    def fence(self, connection: Connection | None = None) -> None:
        """Let the open transaction commit only if the lease has no newer holder; call it last.

        The next holder waits until this transaction ends. So a holder that was suspended for longer than its ttl
        cannot commit.

        Parameters:
          connection: The application's own connection to the lease's database, of any driver with ``%s`` parameters; by
            default the library's own.

        Raises:
          LeaseLost: If the lease has a newer holder. Let it roll the transaction back.
          HousekeepingError: Outside of a transaction, without the lease, or without ``fenced=True``.
        """
        if self._renewal is not None:
            self.check()
        if not self._fenced:
            raise HousekeepingError(
                f"lease {self.key!r} has no epoch; fence() needs fenced=True in ExclusiveLease, "
                'or "fenced": True in the exclusive_lease of the actor'
            )
        if self._fence is None:
            raise HousekeepingError(f"lease {self.key!r} has no epoch: it is not held")
        with database.using(self._database):
            check_epoch(self._fence, connection)

    def __enter__(self) -> ExclusiveLease:
        tries = 0
        while self.try_obtain() is None:
            tries += 1
            time.sleep(self._pause_before(tries))
        self.start_renewal()
        self._begin_block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_block()
        lost = self.lost
        released = self._release_or_warn()
        if (lost or not released) and error is None:
            raise LeaseLost(f"lease {self.key!r} was lost before the end of its block")

    async def __aenter__(self) -> ExclusiveLease:
        if in_transaction():
            self.request()  # raises; the thread that acquires the lease cannot see this thread's transaction
        tries = 0
        while not await self._obtain_in_thread():
            tries += 1
            await asyncio.sleep(self._pause_before(tries))
        self._task = _BlockTask()
        self.start_renewal(on_lost=self._task.cancel_soon)
        self._begin_block()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        canceled = task is not None and task.end()
        if kind is GeneratorExit:  # the event loop was stopped, so nothing can be awaited
            self.__exit__(kind, error, traceback)
            return
        self._end_block()
        lost = self.lost
        released = await in_thread(self._release_or_warn)
        if ((lost or not released) and error is None) or (canceled and kind is asyncio.CancelledError):
            raise LeaseLost(f"lease {self.key!r} was lost before the end of its block") from error

    async def _obtain_in_thread(self) -> bool:
        obtained: list[str] = []

        def obtain() -> None:
            obtained.extend(filter(None, [self.try_obtain()]))

        try:
            await in_thread(obtain)
        except asyncio.CancelledError:
            if obtained:
                await in_thread(self._release_or_warn)
            raise
        return bool(obtained)

    def _pause_before(self, tries: int) -> float:
        """Return the seconds until another try, or raise LeaseHeld after the last one."""
        if tries > self._retries:
            raise LeaseHeld(f"lease {self.key!r} has another holder")
        return self._sleep(tries) if callable(self._sleep) else self._sleep

    def _begin_block(self) -> None:
        self._outer = current_lease.get()
        current_lease.set(self)

    def _end_block(self) -> None:
        # Not by a token: frameworks may end a block in another context than they have begun it in.
        if current_lease.get() is self:
            current_lease.set(self._outer)
        self._outer = None


#: Lease of the innermost block, or of the current message.
current_lease: Final[ContextVar[ExclusiveLease | None]] = ContextVar("current_lease", default=None)


def fence(connection: Connection | None = None) -> None:
    """Let the open transaction commit only if the actor's or block's lease has no newer holder; call it last.

    ::

        @dramatiq.actor(exclusive_lease={"key": "balances", "ttl": timedelta(minutes=10), "fenced": True})
        def settle() -> None:
            with database.atomic():
                write_balances()
                housekeeping.fence()

    It checks the fenced leases of all blocks (``with ExclusiveLease(..., fenced=True)``) around the call, and that of
    the actor. See `ExclusiveLease.fence` for the parameter and all errors.

    Raises:
      HousekeepingError: Also outside of such blocks, and of messages of actors with a fenced ``exclusive_lease``.
    """
    blocks: list[ExclusiveLease] = []
    lease = current_lease.get()
    while lease is not None:
        blocks.append(lease)
        lease = lease._outer
    if not blocks:
        raise HousekeepingError(
            "fence() was called outside of a block of an ExclusiveLease, and of a message of an actor with an "
            "exclusive_lease"
        )
    for lease in [each for each in blocks if each._fenced] or blocks[:1]:
        lease.fence(connection)
