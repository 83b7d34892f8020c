"""Exclusive leases of actors: one run at a time, across all processes and machines."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import redis
from dramatiq import Actor, Broker, MessageProxy, Middleware
from dramatiq.middleware import MiddlewareError

from housekeeping.core.middleware_errors import InvalidOption, Requeue, Skip
from housekeeping.core.redis.client import milliseconds
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.thread_interrupt import LostLease, run_interruptibly
from housekeeping.leases.current import current_lease
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.leases.lease_token import holder_of
from housekeeping.leases.renewal import SHORTEST_TTL
from housekeeping.leases.store import RedisLeaseStore
from housekeeping.middleware.call_keys import bind_call, check_key, key_value

logger = named_logger(__name__)

_EXAMPLE: Final = '{"key": "reports/nightly", "ttl": timedelta(minutes=10), "if_held": "skip"}'

_RETRY_MARGIN: Final = timedelta(seconds=1)  # between the end of a held lease and the next attempt


class _ThreadState(threading.local):
    # By thread, not by message id: a redelivered message has the id of the run it duplicates.
    lease: ExclusiveLease | None = None
    token: str = ""
    answered: bool = False  # whether Redis said that the lease is this token's
    ended: tuple[ExclusiveLease, str, bool, bool] | None = None  # lease, token, answered, lost


class ExclusiveLeases(Middleware):
    """Middleware that allows one run per key at a time.

    An actor opts in with the key and the TTL, which is how long the lease outlives a killed process::

        @dramatiq.actor(exclusive_lease={"key": "reports/nightly", "ttl": timedelta(minutes=10)})
        def publish() -> None: ...

    If the lease is held, the message is dropped. With ``"if_held": "retry"``, or if its own killed attempt holds the
    lease, it is requeued until the lease expires, and no retry is used up. The key may be a callable that takes the
    call's arguments. The lease is renewed while the run is alive.

    A run that loses its lease is ended by `LostLease`, which is raised only inside the actor. The message is retried
    like any failed one. To fence off writes to the database, see `housekeeping.fence`.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._store = RedisLeaseStore(client, namespace)
        self._thread = _ThreadState()

    @property
    def actor_options(self) -> set[str]:
        return {"exclusive_lease"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        option = actor.options.get("exclusive_lease")
        if option is None:
            return
        name = actor.actor_name
        if not isinstance(option, dict) or not {"key", "ttl"} <= set(option) <= {"key", "ttl", "if_held", "database"}:
            raise InvalidOption(f"{name}: exclusive_lease is {option!r}; it should be such as {_EXAMPLE}")
        if option.get("if_held", "skip") not in ("skip", "retry"):
            raise InvalidOption(f'{name}: if_held is {option["if_held"]!r}; it should be "skip" or "retry"')
        if not isinstance(option.get("database", MAIN), str):
            raise InvalidOption(f"{name}: database is {option['database']!r}; it should be the name of a database")
        if not isinstance(option["ttl"], timedelta) or option["ttl"] < SHORTEST_TTL:
            raise InvalidOption(
                f"{name}: exclusive_lease ttl is {option['ttl']!r}; it should be a timedelta of at least 3 seconds"
            )
        if callable(option["key"]):
            check_key(actor, "exclusive_lease", option["key"])
        elif not isinstance(option["key"], str) or not option["key"]:
            raise InvalidOption(
                f"{name}: exclusive_lease key is {option['key']!r}; it should be a text or a callable of the arguments"
            )
        actor.fn = self._interruptible(actor.fn)

    def prepare(self, actor: Actor[..., Any], message: MessageProxy) -> tuple[list[str], list[Any]] | None:
        """Return keys and arguments for the script that acquires the message's lease; None if it needs none."""
        option = actor.options.get("exclusive_lease")
        if option is None:
            return None
        key = option["key"] if isinstance(option["key"], str) else _computed_key(actor, message, option["key"])
        lease = ExclusiveLease(key, option["ttl"], self._store, database=option.get("database", MAIN))
        token = lease.request()
        self._thread.lease, self._thread.token = lease, token
        return [self._store.name(key)], [token, milliseconds(lease.ttl)]

    def refusal(
        self, holder: str, left_ms: int, actor: Actor[..., Any], message: MessageProxy
    ) -> MiddlewareError | None:
        """Start to renew the lease if the message got it, else return the error that drops or requeues the message."""
        lease, token = self._thread.lease, self._thread.token
        assert lease is not None
        if holder == token:
            lease.answered(token, holder)
            self._thread.answered = True
            current_lease.set(lease)
            lease.start_renewal(interrupting=True)
            return None
        self.forget()
        lease.answered(token, holder)
        other = holder_of(holder)
        held_for = other.held_for or timedelta()
        logger.info(
            "Lease is held elsewhere",
            lease=lease.key,
            held_for_s=round(held_for.total_seconds(), 1),
            reason="lease_held",
        )
        # Held by its own killed attempt, or one that seems killed: dropping the message would lose its work.
        option = actor.options["exclusive_lease"]
        if option.get("if_held") == "retry" or other.message_id == message.message_id:
            left = timedelta(milliseconds=max(left_ms, 0))
            return Requeue(f"lease {lease.key!r} is held", min(left + _RETRY_MARGIN, option["ttl"]))
        return Skip("lease_held")

    def end(self) -> tuple[list[str], list[Any]] | None:
        """Stop using this thread's lease; return keys and arguments for the script that releases it."""
        lease, token, answered = self._thread.lease, self._thread.token, self._thread.answered
        self.forget()
        if lease is None:
            return None
        lost = answered and lease.lost
        # Without an answer, Redis may have granted it.
        given_up = lease.give_up() if answered else token
        self._thread.ended = (lease, token, answered, lost)
        return None if given_up is None else ([self._store.name(lease.key)], [token])

    def ended(self, *, held: bool) -> None:
        """Log whether this thread's lease was lost; `held` is whether the script found it held."""
        ended, self._thread.ended = self._thread.ended, None
        if ended is None:
            return
        lease, token, answered, lost = ended
        if answered and (lost or not held):
            lease.count_loss(token, lost=True)
            logger.warning("Lease was lost before its run ended", lease=lease.key, reason="lost_lease")

    def forget(self) -> None:
        """Forget this thread's lease."""
        self._thread.lease, self._thread.answered = None, False
        if current_lease.get() is not None:
            current_lease.set(None)

    def _interruptible(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._thread.lease is None:
                return function(*args, **kwargs)  # called directly, not by a worker
            return run_interruptibly(self._run_holding, function, *args, **kwargs)

        return run

    def _run_holding(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the actor's function, unless the lease was lost before the function started."""
        if self._thread.lease is not None and self._thread.lease.lost:
            raise LostLease
        return function(*args, **kwargs)


def _computed_key(actor: Actor[..., Any], message: MessageProxy, key: Callable[..., object]) -> str:
    return str(key_value(actor, bind_call(actor, message.args, message.kwargs), key))
