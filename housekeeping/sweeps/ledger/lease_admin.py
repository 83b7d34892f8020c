"""Leases as an operator sees them: who holds what, since when, in which run; and how one is taken from its holder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import redis
from peewee import InterfaceError, OperationalError

from housekeeping.core.errors import DatabaseUnavailable, HousekeepingError, RedisUnavailable, Refused
from housekeeping.core.redis_client import text, translate_redis_errors
from housekeeping.core.sanitize import error_line
from housekeeping.database.connection import database, sqlstate, translate_postgres_errors
from housekeeping.leases.fencing import Lease
from housekeeping.leases.lease_token import holder_of
from housekeeping.leases.store import RedisLeaseStore
from housekeeping.sweeps.insight.run_state import HEARTBEAT_AGE_S
from housekeeping.sweeps.ledger.models import Run

#: What stands in the database as the holder of a lease that was released by hand.
RELEASED: Final = "released by hand"
_LOCK_TIMEOUT: Final = "55P03"  # PostgreSQL's code
_PAGE: Final = 1000  # keys a round trip


class UnknownLease(Refused):
    """Nobody holds a lease of this key, and no run says that it does."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    """One lease and its holder.

    Attributes:
      process: Machine and process id of the holder; null: unknown.
      worker: The actor or sweep that holds it; null for application code.
      message_id: Of the message it is held for; null when it is held for none.
      held_for_s: By the clocks of the two machines.
      remaining_s: Until it expires unless it is renewed; null: Redis has it no more, but its run is open.
      epoch: Null: it was taken while there was no database.
      run_id: The open run that holds it; null for plain actors and application code.
      silent_for_s: How long ago that run last gave a sign of life.
      token: What is this holder's alone; not for showing.
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

    @property
    def holder(self) -> str:
        """Worker and process in words."""
        return " ".join(filter(None, (self.worker, self.process and f"on {self.process}"))) or "unknown"

    def as_json(self) -> dict[str, Any]:
        """As values by name, without the token."""
        return {name: value for name, value in asdict(self).items() if name != "token"}


@dataclass(frozen=True, slots=True)
class _Epoch:
    """A lease as the database knows it, with its run if that is open."""

    epoch: int
    token: str
    run_id: int | None
    silent_for_s: float | None


def held_leases(client: redis.Redis | None, namespace: str) -> list[HeldLease]:
    """Every lease held now, and those that Redis has lost while their run is open; by key.

    Parameters:
      client: Null: only what the database knows, where one is configured.

    Raises:
      RedisUnavailable: When Redis does not answer.
      DatabaseUnavailable: When PostgreSQL does not answer.
    """
    in_redis = {} if client is None else {key: (token, left) for key, token, left in _scanned(client, namespace)}
    known = {} if database.obj is None else _known(list(in_redis))
    found = []
    for key, (token, left_ms) in in_redis.items():
        epoch = known.get(key)
        found.append(_held(key, token, left_ms / 1000, epoch if epoch and epoch.token == token else None))
    for key, epoch in known.items():
        if epoch.run_id is not None and in_redis.get(key, ("", 0))[0] != epoch.token:
            found.append(_held(key, epoch.token, None, epoch))
    return sorted(found, key=lambda each: each.key)


def release_lease(client: redis.Redis, namespace: str, key: str, expected: str | None = None) -> HeldLease:
    """Take a lease from its holder, so that the next one may begin; returns what it was.

    First its epoch is raised: from then on a holder that still lives, or only sleeps, commits nothing more, and its
    run ends as ``lost_lease``. Then Redis lets go of it, unless somebody else holds it by now.

    Parameters:
      expected: The token of the holder that is meant; null: whoever holds it.

    Raises:
      UnknownLease: When there is none of this key.
      RedisUnavailable: When Redis does not answer; the text says what was done.
      DatabaseUnavailable: When PostgreSQL does not answer; nothing was done.
      HousekeepingError: When a transaction of the holder is open, or another holder has begun; nothing was done.
    """
    store = RedisLeaseStore(client, namespace)
    # First: the epoch of one who begins after this look is another one, and is not raised.
    epoch = None if database.obj is None else _known([key]).get(key)
    token, left = store.owner(key), store.remaining(key)
    if token is None and (epoch is None or epoch.run_id is None):
        raise UnknownLease(f"nobody holds a lease {key!r}; housekeeping leases list shows those that are held")
    holder = token if token is not None or epoch is None else epoch.token
    if expected is not None and holder != expected:
        raise _another_holder(key)
    if epoch is not None:
        _raise_epoch(key, epoch.epoch)
    if token is None:
        return _held(key, epoch.token if epoch else "", None, epoch)
    try:
        store.release(key, token)
    except RedisUnavailable as error:
        done = "its holder commits nothing more, but " if epoch else ""
        raise RedisUnavailable(f"lease {key!r}: {done}it stays until its ttl is over: {error}") from error
    return _held(key, token, left.total_seconds() if left else 0.0, epoch if epoch and epoch.token == token else None)


def _raise_epoch(key: str, seen: int) -> None:
    try:
        with database.atomic():
            # Only while nobody has begun since it was looked at: a successor is not to be fenced off in its place.
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
            "PostgreSQL ends one that stands still within a minute"
        ) from error
    if raised == 0:
        raise _another_holder(key)


def _another_holder(key: str) -> HousekeepingError:
    return HousekeepingError(f"lease {key!r}: another holder has begun meanwhile; nothing was released")


def _scanned(client: redis.Redis, namespace: str) -> Iterator[tuple[str, str, int]]:
    """Key, token and milliseconds left of every lease; a round trip for each page."""
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
                    continue  # not ours, and no reason to show nothing of what is
                for answer in (token, left):
                    if isinstance(answer, redis.RedisError):
                        raise answer
                if token is not None and left >= 0:
                    yield text(name).removeprefix(prefix), text(token), left


def _known(keys: list[str]) -> dict[str, _Epoch]:
    """What the database knows of these leases, and of all whose run is open."""
    # PostgreSQL has no text with a null character in it.
    keys = [key for key in keys if "\0" not in key]
    open_runs = Run.outcome.is_null() & Run.epoch.is_null(False)
    with translate_postgres_errors():
        rows: Any = Run.select(Run.worker, Run.epoch, Run.id, HEARTBEAT_AGE_S).where(open_runs).tuples()
        runs = {(worker, epoch): (run_id, float(silent_s)) for worker, epoch, run_id, silent_s in rows}
        leases: Any = (
            Lease.select(Lease.key, Lease.epoch, Lease.holder)
            .where(Lease.key.in_(keys) | Lease.epoch.in_([epoch for _, epoch in runs]))
            .tuples()
        )
        known = {}
        for key, epoch, token in leases:
            run_id, silent_for_s = runs.get((holder_of(token).worker or "", epoch), (None, None))
            known[key] = _Epoch(epoch, token, run_id, silent_for_s)
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
    )
