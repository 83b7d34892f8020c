"""Administration of leases: the list with holders and runs, and the release by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Final

import redis
from peewee import InterfaceError, OperationalError, PeeweeException

from housekeeping.core.errors import DatabaseUnavailable, HousekeepingError, RedisUnavailable, Refused
from housekeeping.core.redis.client import text, translate_redis_errors
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import MAIN
from housekeeping.database.connection import database, sqlstate, translate_postgres_errors
from housekeeping.database.time_limit import time_limit
from housekeeping.leases.fencing import Lease, next_epoch
from housekeeping.leases.lease_token import holder_of
from housekeeping.leases.store import RedisLeaseStore
from housekeeping.sweeps.ledger.history import name_database, run_label
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.processes.heartbeats import seconds_since

#: Holder stored in the database for a lease released by hand.
RELEASED: Final = "released by hand"
_LOCK_TIMEOUT: Final = "55P03"  # PostgreSQL's code
#: An operator waits for the list, and a locked ledger must not delay it for long.
_READ_TIME: Final = timedelta(seconds=5)
_LOCK_TIME: Final = timedelta(seconds=1)
_PAGE: Final = 1000  # keys a round trip


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
      remaining_s: Seconds until it expires unless renewed; None if Redis lost it but its run is open.
      epoch: Fencing token; None if acquired without a database, or not fenced yet.
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

    @property
    def run_label(self) -> str | None:
        """Label of the run that holds the lease; None if no run holds it."""
        return None if self.run_id is None else run_label(self.run_id, self.database)

    @property
    def holder(self) -> str:
        """Worker and process as text."""
        return " ".join(filter(None, (self.worker, self.process and f"on {self.process}"))) or "unknown"

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, without the token."""
        values = {name: value for name, value in asdict(self).items() if name not in ("token", "database")}
        return name_database(values, self.database)


@dataclass(frozen=True, slots=True)
class _Epoch:
    """A lease in the database, with its open run."""

    epoch: int
    token: str
    run_id: int | None
    silent_for_s: float | None
    database: str


def held_leases(client: redis.Redis | None, namespace: str) -> list[HeldLease]:
    """Return the held leases, and those that Redis lost while their run is open, by key.

    Parameters:
      client: None to read only the database, if one is configured.

    Raises:
      RedisUnavailable: When Redis does not answer.
      DatabaseUnavailable: When PostgreSQL does not answer.
    """
    in_redis = {} if client is None else {key: (token, left) for key, token, left in _scanned(client, namespace)}
    known = {key: epochs[-1] for key, epochs in _known_everywhere(list(in_redis)).items()}
    found = []
    for key, (token, left_ms) in in_redis.items():
        epoch = known.get(key)
        found.append(_held(key, token, left_ms / 1000, epoch if epoch and epoch.token == token else None))
    for key, epoch in known.items():
        if epoch.run_id is not None and in_redis.get(key, ("", 0))[0] != epoch.token:
            found.append(_held(key, epoch.token, None, epoch))
    return sorted(found, key=lambda each: each.key)


def release_lease(client: redis.Redis, namespace: str, key: str, expected: str | None = None) -> HeldLease:
    """Release a lease by hand and return it as it was.

    The holder is fenced off first: the epoch is raised, so that it cannot commit even if it is still alive, and its run
    ends as ``lost_lease``. Then the lease is released in Redis, unless it has another holder by now.

    Parameters:
      expected: The token of the expected holder; None for any holder.

    Raises:
      UnknownLease: No lease of this key is held.
      RedisUnavailable: When Redis does not answer; the text says what was done.
      DatabaseUnavailable: When PostgreSQL does not answer; nothing was done.
      HousekeepingError: When a transaction of the holder is open, or another holder has begun; nothing was done.
    """
    store = RedisLeaseStore(client, namespace)
    # Read before Redis: a holder that begins later has another epoch, which is not raised.
    known = _known_everywhere([key], of_all=True).get(key, [])
    epoch = known[-1] if known else None
    token, left = store.owner(key), store.remaining(key)
    if token is None and (epoch is None or epoch.run_id is None):
        raise UnknownLease(f"no lease {key!r} is held; to see the held ones: housekeeping leases list")
    holder = token if token is not None or epoch is None else epoch.token
    if expected is not None and holder != expected:
        raise _another_holder(key)
    for each in known:
        with database.using(each.database):
            _raise_epoch(key, each.epoch)
    for name in database.by_name() if not known else ():
        with database.using(name):
            _raise_epoch(key, None)
    if token is None:
        return _held(key, epoch.token if epoch else "", None, epoch)
    try:
        store.release(key, token)
    except RedisUnavailable as error:
        done = "its holder can no longer commit, but " if epoch else ""
        raise RedisUnavailable(f"lease {key!r}: {done}it stays in Redis until its ttl ends: {error}") from error
    return _held(key, token, left.total_seconds() if left else 0.0, epoch if epoch and epoch.token == token else None)


def _raise_epoch(key: str, seen: int | None) -> None:
    try:
        with database.atomic():
            if seen is None:
                next_epoch(key, RELEASED)  # makes the holder's first fence fail
                return
            # Only if the epoch is unchanged, or a successor would be fenced off instead.
            raised = (
                Lease.update(epoch=Lease.epoch + 1, holder=RELEASED)
                .where((Lease.key == key) & (Lease.epoch == seen))
                .execute()
            )
    except (OperationalError, InterfaceError) as error:
        if sqlstate(error) != _LOCK_TIMEOUT:
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


def _scanned(client: redis.Redis, namespace: str) -> Iterator[tuple[str, str, int]]:
    """Yield key, token and remaining milliseconds of every lease; one round trip per page."""
    prefix = f"{namespace}:lease:"
    with translate_redis_errors():
        names = sorted(set(client.scan_iter(match=f"{prefix}*", count=_PAGE)))
        for start in range(0, len(names), _PAGE):
            page = names[start : start + _PAGE]
            with client.pipeline(transaction=False) as pipeline:
                for name in page:
                    pipeline.get(name)
                    pipeline.pttl(name)
                answers = iter(pipeline.execute(raise_on_error=False))
            for name, token, left in zip(page, answers, answers, strict=True):
                if isinstance(token, redis.ResponseError) and str(token).startswith("WRONGTYPE"):
                    continue  # not a lease of this library; the others are still listed
                for answer in (token, left):
                    if isinstance(answer, redis.RedisError):
                        raise answer
                if token is not None and left >= 0:
                    yield text(name).removeprefix(prefix), text(token), left


def _known_everywhere(keys: list[str], *, of_all: bool = False) -> dict[str, list[_Epoch]]:
    """Return these leases and all with an open run by key, from each database; those with an open run last.

    Parameters:
      of_all: Whether every database must answer while none has one of the keys. Otherwise one answer is enough.
    """
    found: dict[str, list[_Epoch]] = {}
    unavailable: list[Exception] = []
    databases = database.by_name()
    for name in databases:
        try:
            with database.using(name):
                for key, epoch in _known(keys).items():
                    found.setdefault(key, []).append(epoch)
        except (DatabaseUnavailable, PeeweeException) as error:  # also one without the schema
            unavailable.append(error)
    if unavailable and (len(unavailable) == len(databases) or (of_all and not found.keys() & set(keys))):
        raise unavailable[0]
    for epochs in found.values():
        epochs.sort(key=lambda each: each.run_id is not None)
    return found


def _known(keys: list[str]) -> dict[str, _Epoch]:
    """Return these leases and all with an open run, from the current database."""
    # PostgreSQL cannot store a null character in a text.
    keys = [key for key in keys if "\0" not in key]
    open_runs = Run.outcome.is_null() & Run.epoch.is_null(False)
    with translate_postgres_errors(), time_limit(_READ_TIME, _LOCK_TIME):
        rows: Any = Run.select(Run.worker, Run.epoch, Run.id, seconds_since(Run.heartbeat_at)).where(open_runs).tuples()
        runs = {(worker, epoch): (run_id, float(silent_s)) for worker, epoch, run_id, silent_s in rows}
        leases: Any = (
            Lease.select(Lease.key, Lease.epoch, Lease.holder)
            .where(Lease.key.in_(keys) | Lease.epoch.in_([epoch for _, epoch in runs]))
            .tuples()
        )
        known = {}
        for key, epoch, token in leases:
            run_id, silent_for_s = runs.get((holder_of(token).worker or "", epoch), (None, None))
            known[key] = _Epoch(epoch, token, run_id, silent_for_s, database.selected)
        return known


def _held(key: str, token: str, remaining_s: float | None, epoch: _Epoch | None) -> HeldLease:
    holder = holder_of(token)
    return HeldLease(
        key,
        holder.process,
        holder.worker,
        holder.message_id,
        None if holder.held_for is None else round(holder.held_for.total_seconds(), 1),
        remaining_s,
        epoch.epoch if epoch else None,
        epoch.run_id if epoch else None,
        round(epoch.silent_for_s, 1) if epoch and epoch.silent_for_s is not None else None,
        token,
        epoch.database if epoch else MAIN,
    )
