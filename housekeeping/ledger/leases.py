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
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from peewee import SQL, InterfaceError, OperationalError, PeeweeException

from housekeeping.core.errors import DatabaseUnavailable, HousekeepingError, RedisUnavailable, Refused
from housekeeping.core.logs import error_line
from housekeeping.core.redis import text, translate_redis_errors
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry import current_message
from housekeeping.database.connection import database, time_limit, translate_postgres_errors
from housekeeping.database.errors import is_lock_timeout
from housekeeping.ledger.schema import NOW, LeaseRow, Run, name_database, run_label, seconds_since

if TYPE_CHECKING:
    import redis


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


def epoch_query(key: str, token: str) -> Any:
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


#: Holder stored in the database for a lease released by hand.
RELEASED: Final = "released by hand"
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


def held_leases(client: redis.Redis | None, namespace: str, only: str | None = None) -> list[HeldLease]:
    """Return the held leases, and those that Redis lost while their run is open, by key.

    Parameters:
      client: None to read only the database, if one is configured.
      only: The key of the only lease to return; None for all.

    Raises:
      RedisUnavailable: When Redis does not answer.
      DatabaseUnavailable: When PostgreSQL does not answer.
    """
    in_redis = {} if client is None else {key: (token, left) for key, token, left in _scanned(client, namespace, only)}
    known = {key: leases[-1] for key, leases in _known_everywhere(list(in_redis)).items()}
    found = [_in_redis(key, token, left_ms, known.get(key)) for key, (token, left_ms) in in_redis.items()]
    for key, lease in known.items():
        if lease.run_id is not None and in_redis.get(key, ("", 0))[0] != lease.token:
            found.append(lease)
    return sorted((each for each in found if only in (None, each.key)), key=lambda each: each.key)


def _in_redis(key: str, token: str, left_ms: int, known: HeldLease | None) -> HeldLease:
    """Return the lease in Redis, with what the database knows of the same holder."""
    lease = known if known is not None and known.token == token else HeldLease.of(key, token)
    return replace(lease, remaining_s=max(0, left_ms) / 1000)


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
    # Read before Redis: a holder that begins later has another epoch, which is not raised.
    known = _known_everywhere([key], of_all=True).get(key, [])
    last = known[-1] if known else None
    name = f"{namespace}:lease:{key}"
    with translate_redis_errors():
        found, left_ms = client.get(name), client.pttl(name)
    token = None if found is None else text(found)
    if token is not None:
        lease = _in_redis(key, token, left_ms, last)
    elif last is not None and last.run_id is not None:
        lease = last
    else:
        raise UnknownLease(f"no lease {key!r} is held; to see the held ones: housekeeping leases list")
    if expected is not None and lease.token != expected:
        raise _another_holder(key)
    for each in known:
        with database.using(each.database):
            _raise_epoch(key, each.epoch)
    if token is None:
        return lease
    try:
        _delete_if_equal(client, name, token)
    except RedisUnavailable as error:
        done = "its holder can no longer commit, but " if last else ""
        raise RedisUnavailable(f"lease {key!r}: {done}it stays in Redis until its ttl ends: {error}") from error
    return lease


def _delete_if_equal(client: redis.Redis, name: str, token: str) -> None:
    def delete(pipeline: Any) -> None:
        is_equal = text(pipeline.get(name) or "") == token
        pipeline.multi()
        if is_equal:
            pipeline.delete(name)

    with translate_redis_errors():
        client.transaction(delete, name)  # watches it, because another holder may acquire it meanwhile


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


def _scanned(client: redis.Redis, namespace: str, only: str | None) -> Iterator[tuple[str, str, int]]:
    """Yield key, token and remaining milliseconds of every lease, or of one; one round trip per page."""
    import redis

    prefix = f"{namespace}:lease:"
    with translate_redis_errors():
        names: list[Any] = [f"{prefix}{only}"]
        if only is None:
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
