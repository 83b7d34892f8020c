"""Rows of leases: their epochs, the tokens that describe their holders, the list of held leases, the release by hand.

A holder's token contains since when, machine, process, worker and message. An epoch is a fencing token: a number that
increases with each holder of a lease.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol

from peewee import EXCLUDED, SQL, InterfaceError, OperationalError, PeeweeException

from housekeeping.core.errors import DatabaseUnavailable, HousekeepingError, Refused, SchemaMissing, ServerUnavailable
from housekeeping.core.logs import error_line
from housekeeping.core.redis import retry_on_outage
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry import current_message
from housekeeping.database.connection import database, time_limit, translate_postgres_errors
from housekeeping.database.errors import Kind, is_lock_timeout, kind_of
from housekeeping.ledger.schema import NOW, HeldLeaseRow, LeaseRow, Run, name_database, run_label, seconds_since

#: Unix milliseconds, random part, machine:process, and for a run its worker and message.
_TOKEN: Final = re.compile(r"(?P<ms>\d{1,15})-[0-9a-f]{32}(?: (?P<process>\S*) (?P<worker>\S*) (?P<message_id>\S*))?")


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a lease, as described by its token; None is unknown.

    Attributes:
      held_since_ms: Time of the acquisition by its machine's clock, in Unix milliseconds.
      process: Machine and process id, separated by a colon.
      worker: The actor or sweep that holds the lease; None for application code.
      message_id: Id of the message; None on the command line and in application code.
    """

    held_since_ms: int | None = None
    process: str | None = None
    worker: str | None = None
    message_id: str | None = None

    @property
    def held_for(self) -> timedelta | None:
        """Time since the acquisition, by the clocks of both machines; None if unknown."""
        if self.held_since_ms is None:
            return None
        return timedelta(milliseconds=max(0, time.time() * 1000 - self.held_since_ms))


def new_token(worker: str | None = None) -> str:
    """Return a unique token that describes the current process and message.

    Parameters:
      worker: Name of the worker; by default that of the current message.
    """
    message = current_message.get()
    worker = worker or (message.worker if message else None)
    parts = (f"{platform.node()}:{os.getpid()}", worker or "", message.message_id if message else "")
    # Parts are separated by spaces, so they contain none.
    # As unique as a UUID, and made in a quarter of the time.
    unique = f"{int(time.time() * 1000)}-{os.urandom(16).hex()}"
    return " ".join((unique, *("".join(part.split()) for part in parts)))


def worker_of(token: str) -> str:
    """Return the worker in a token of this process, an empty string if it has none."""
    return token.split(" ")[2]


def holder_of(token: str | None) -> Holder:
    """Return the holder that a token describes; all its fields are None for a token in another form."""
    match = _TOKEN.fullmatch(token or "")
    if match is None:
        return Holder()
    return Holder(int(match["ms"]), *(match[part] or None for part in ("process", "worker", "message_id")))


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


#: The column's default, because an identity column needs no right on its sequence.
NEXT_EPOCH: Final = SQL("DEFAULT")


def next_epoch(key: str, token: str) -> int:
    """Issue the next epoch of the key, in the current transaction; see `epoch_query`."""
    epoch: int = next(iter(epoch_query(key, token).tuples().execute()))[0]
    return epoch


def epoch_query(key: Any, token: Any) -> Any:
    """Return the query that issues and returns the next epoch of the key.

    It waits for open transactions of the last holder that have checked their epoch.
    """
    columns = {LeaseRow.epoch: NEXT_EPOCH, LeaseRow.holder: token, LeaseRow.used_at: NOW}
    # On a conflict PostgreSQL locks the row, and then draws another number. A number that was drawn before the lock
    # could be lower than that of a holder in between.
    query: Any = LeaseRow.insert({LeaseRow.key: key, **columns}).on_conflict(
        conflict_target=[LeaseRow.key], update=columns
    )
    return query.returning(LeaseRow.epoch)


def is_of(key: Any, epoch: Any, holder: Any) -> Any:
    """Return the condition that this holder still has the lease."""
    return (LeaseRow.key == key) & (LeaseRow.epoch == epoch) & (LeaseRow.holder == holder)


class LeaseStore(Protocol):
    """Storage of leases, safe to share between threads. Every method may raise `ServerUnavailable`."""

    def obtain(self, key: str, token: str, ttl: timedelta) -> str:
        """Acquire the lease unless another token holds it; return the token that holds it now."""

    def renew(self, key: str, token: str, ttl: timedelta) -> bool:
        """Extend the lease to its full ttl; return False if the token no longer holds it."""

    def release(self, key: str, token: str) -> bool:
        """Release the lease; return False if the token no longer holds it."""

    def owner(self, key: str) -> str | None:
        """Return the token that holds the lease, if any."""

    def remaining(self, key: str) -> timedelta | None:
        """Return the time until the lease expires; None if it is free."""

    def held(self, only: str | None = None) -> Iterator[tuple[str, str, timedelta]]:
        """Yield key, token and remaining time of every held lease, or of the one with this key."""


#: Kinds of error of a server that accepts no commits for now, such as a standby.
_UNAVAILABLE: Final = (Kind.LOST, Kind.READ_ONLY, Kind.RESOURCES)


class PostgresLeaseStore:
    """Leases as rows of the database ``main``, by its clock, for an installation without Redis.

    Each operation is one statement that commits at once. It closes the connection if it has opened it.
    """

    def obtain(self, key: str, token: str, ttl: timedelta) -> str:
        given = {HeldLeaseRow.key: key, HeldLeaseRow.holder: token, HeldLeaseRow.expires_at: NOW + ttl}
        is_free = (HeldLeaseRow.expires_at <= NOW) | (HeldLeaseRow.holder == EXCLUDED.holder)
        taking = HeldLeaseRow.insert(given).on_conflict(
            conflict_target=[HeldLeaseRow.key],
            # Not the inserted time, because the statement may have waited for the row.
            update={HeldLeaseRow.holder: EXCLUDED.holder, HeldLeaseRow.expires_at: NOW + ttl},
            where=is_free,
        )
        while True:
            # Retried: a lost answer would leave an acquired lease unreleased until its ttl.
            for (holder,) in retry_on_outage(lambda: _in_main(taking.returning(HeldLeaseRow.holder)), 2, 0):
                return str(holder)
            if (owner := self.owner(key)) is not None:
                return owner  # if it is None, the lease was released between the two statements

    def renew(self, key: str, token: str, ttl: timedelta) -> bool:
        renewed = HeldLeaseRow.update(expires_at=NOW + ttl).where(_is_held(key) & (HeldLeaseRow.holder == token))
        return bool(_in_main(renewed.returning(HeldLeaseRow.key)))

    def release(self, key: str, token: str) -> bool:
        released = HeldLeaseRow.delete().where(_is_held(key) & (HeldLeaseRow.holder == token))
        return bool(_in_main(released.returning(HeldLeaseRow.key)))

    def owner(self, key: str) -> str | None:
        return next((token for _, token, _ in self.held(key)), None)

    def remaining(self, key: str) -> timedelta | None:
        return next((left for _, _, left in self.held(key)), None)

    def held(self, only: str | None = None) -> Iterator[tuple[str, str, timedelta]]:
        left = HeldLeaseRow.expires_at - NOW
        yield from _in_main(HeldLeaseRow.select(HeldLeaseRow.key, HeldLeaseRow.holder, left).where(_is_held(only)))


def _is_held(key: str | None) -> Any:
    of_key = SQL("true") if key is None else HeldLeaseRow.key == key
    return of_key & (HeldLeaseRow.expires_at > NOW)


def _in_main(query: Any) -> list[tuple[Any, ...]]:
    with database.using(MAIN), translate_postgres_errors(), lease_statement():
        return list(query.tuples().execute())


@contextmanager
def lease_statement() -> Iterator[None]:
    """Execute a statement about a lease; afterward, close the connection if the thread had none.

    Raises:
      DatabaseUnavailable, SchemaMissing: If leases are not available.
      peewee.PeeweeException: For any other error.
    """
    # Only a worker's thread keeps the connection for its next message.
    close = database.is_closed() and current_message.get() is None
    try:
        yield
    except PeeweeException as error:
        if kind_of(error) is Kind.STATEMENT:  # a missing schema, table, column or right
            raise SchemaMissing(f"{error_line(error)}; run: housekeeping init") from error
        if kind_of(error) in _UNAVAILABLE:
            raise DatabaseUnavailable(f"PostgreSQL did not answer: {error_line(error)}") from error
        raise
    finally:
        if close and not database.is_closed():
            database.close()


#: Holder stored in the database for a lease released by hand.
RELEASED: Final = "released by hand"
#: An operator waits for the list, and a locked ledger must not delay it for long.
_READ_TIME: Final = timedelta(seconds=5)
_LOCK_TIME: Final = timedelta(seconds=1)


class UnknownLease(Refused):
    """No lease of this key is held, and no open run has it."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    """One lease and its holder.

    Attributes:
      process: Machine and process id of the holder; None if unknown.
      worker: The actor or sweep that holds it; None for application code.
      message_id: The message it is held for; None without one.
      held_for_s: Seconds since the acquisition, by the clocks of both machines.
      remaining_s: Seconds until it expires unless renewed; None if the store lost it but its run is open.
      epoch: Fencing token; None if the lease is not fenced.
      run_id: The open run that holds it; None for plain actors and application code.
      silent_for_s: Age of that run's last heartbeat in seconds.
      token: Secret of the holder; not shown.
      database: Name of the database with the epoch and the run.
    """

    key: str
    process: str | None
    worker: str | None
    message_id: str | None
    held_for_s: float | None
    remaining_s: float | None = None
    epoch: int | None = None
    run_id: int | None = None
    silent_for_s: float | None = None
    token: str = field(default="", repr=False)
    database: str = MAIN

    @classmethod
    def of(cls, key: str, token: str, **known: Any) -> HeldLease:
        """Return the lease of the holder that the token describes, with what else is known of it."""
        holder = holder_of(token)
        held_for_s = None if holder.held_for is None else round(holder.held_for.total_seconds(), 1)
        return cls(key, holder.process, holder.worker, holder.message_id, held_for_s, token=token, **known)

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``leases`` in ``housekeeping leases list --json``."""
        shown = ("key", "process", "worker", "message_id", "held_for_s", "remaining_s", "epoch", "run_id")
        values = {name: getattr(self, name) for name in shown}
        return name_database({**values, "heartbeat_age_s": self.silent_for_s}, self.database)

    @property
    def run_label(self) -> str | None:
        """Label of the run that holds the lease; None if no run holds it."""
        return None if self.run_id is None else run_label(self.run_id, self.database)

    @property
    def holder(self) -> str:
        """Worker and process as text."""
        return " ".join(filter(None, (self.worker, self.process and f"on {self.process}"))) or "unknown"


def held_leases(store: LeaseStore | None, only: str | None = None) -> list[HeldLease]:
    """Return the held leases, and leases that the store lost while their run is open, sorted by key.

    Parameters:
      store: None to read only the runs in the databases, if one is configured.
      only: The key of the only lease to return; None for all.

    Raises:
      RedisUnavailable: When Redis does not answer.
      DatabaseUnavailable: When PostgreSQL does not answer.
    """
    stored = {} if store is None else {key: (token, left) for key, token, left in store.held(only)}
    known = {key: leases[-1] for key, leases in _known_everywhere(list(stored)).items()}
    found = [_in_store(key, token, left, known.get(key)) for key, (token, left) in stored.items()]
    for key, lease in known.items():
        if lease.run_id is not None and stored.get(key, ("", 0))[0] != lease.token:
            found.append(lease)
    return sorted((each for each in found if only in (None, each.key)), key=lambda each: each.key)


def _in_store(key: str, token: str, left: timedelta, known: HeldLease | None) -> HeldLease:
    """Return a lease of the store, completed with what the database has about the same holder."""
    lease = known if known is not None and known.token == token else HeldLease.of(key, token)
    return replace(lease, remaining_s=max(0.0, round(left.total_seconds(), 3)))


def release_lease(store: LeaseStore, key: str, expected: str | None = None) -> HeldLease:
    """Release a lease by hand and return it as it was.

    The holder is fenced off first: the epoch is raised, so that it cannot commit even if it is still alive, and its run
    ends as ``lost_lease``. Then the lease is released in the store, unless it has another holder by now.

    Parameters:
      expected: The token of the expected holder; None for any holder.

    Raises:
      UnknownLease: No lease of this key is held.
      RedisUnavailable: When Redis does not answer; the text says what was done.
      DatabaseUnavailable: When PostgreSQL does not answer; nothing was done.
      HousekeepingError: When a transaction of the holder is open, or another holder has begun; nothing was done.
    """
    # Read before the store: a holder that begins later has another epoch, which is not raised.
    known = _known_everywhere([key], of_all=True).get(key, [])
    last = known[-1] if known else None
    held = next(store.held(key), None)
    if held is not None:
        lease = _in_store(*held, last)
    elif last is not None and last.run_id is not None:
        lease = last
    else:
        raise UnknownLease(f"no lease {key!r} is held; to see the held ones: housekeeping leases list")
    if expected is not None and lease.token != expected:
        raise _another_holder(key)
    for each in known:
        with database.using(each.database):
            _raise_epoch(key, each.epoch)
    if held is None:
        return lease
    try:
        store.release(key, lease.token)
    except ServerUnavailable as error:
        done = "its holder can no longer commit, but " if last else ""
        raise type(error)(f"lease {key!r}: {done}it is held until its ttl ends: {error}") from error
    return lease


def _raise_epoch(key: str, seen: int | None) -> None:
    try:
        with database.atomic():
            # Only if the epoch is unchanged, or a successor would be fenced off instead.
            raised = (
                LeaseRow.update(epoch=NEXT_EPOCH, holder=RELEASED)
                .where((LeaseRow.key == key) & (LeaseRow.epoch == seen))
                .execute()
            )
    except (OperationalError, InterfaceError) as error:
        if not is_lock_timeout(error):
            raise DatabaseUnavailable(
                f"PostgreSQL did not answer: {error_line(error)}; nothing was released"
            ) from error
        raise HousekeepingError(
            f"lease {key!r}: a transaction of its holder is open, so nothing was released; "
            "PostgreSQL ends an idle one within a minute"
        ) from error
    if raised == 0:
        raise _another_holder(key)


def _another_holder(key: str) -> HousekeepingError:
    return HousekeepingError(f"lease {key!r}: another holder has begun meanwhile; nothing was released")


def _known_everywhere(keys: list[str], *, of_all: bool = False) -> dict[str, list[HeldLease]]:
    """Return these leases and all with an open run by key, from each database; those with an open run last.

    Parameters:
      of_all: Whether every database must answer while none has one of the keys. Otherwise one answer is enough.
    """
    found: dict[str, list[HeldLease]] = {}
    unavailable: list[Exception] = []
    databases = database.by_name()
    for name in databases:
        try:
            with database.using(name):
                for lease in _known(keys):
                    found.setdefault(lease.key, []).append(lease)
        except (DatabaseUnavailable, PeeweeException) as error:  # also one without the schema
            unavailable.append(error)
    if unavailable and (len(unavailable) == len(databases) or (of_all and not found.keys() & set(keys))):
        raise unavailable[0]
    for leases in found.values():
        leases.sort(key=lambda each: each.run_id is not None)
    return found


def _known(keys: list[str]) -> list[HeldLease]:
    """Return these leases and all with an open run, from the current database."""
    # PostgreSQL cannot store a null character in a text.
    keys = [key for key in keys if "\0" not in key]
    open_runs = Run.outcome.is_null() & Run.epoch.is_null(False)
    with translate_postgres_errors(), time_limit(_READ_TIME, _LOCK_TIME):
        rows: Any = Run.select(Run.worker, Run.epoch, Run.id, seconds_since(Run.heartbeat_at)).where(open_runs).tuples()
        runs = {(worker, epoch): (run_id, round(float(silent_s), 1)) for worker, epoch, run_id, silent_s in rows}
        leases: Any = (
            LeaseRow.select(LeaseRow.key, LeaseRow.epoch, LeaseRow.holder)
            .where(LeaseRow.key.in_(keys) | LeaseRow.epoch.in_([epoch for _, epoch in runs]))
            .tuples()
        )
        found = []
        for key, epoch, token in leases:
            run_id, silent_for_s = runs.get((holder_of(token).worker or "", epoch), (None, None))
            known = {"epoch": epoch, "run_id": run_id, "silent_for_s": silent_for_s, "database": database.selected}
            found.append(HeldLease.of(key, token, **known))
        return found
