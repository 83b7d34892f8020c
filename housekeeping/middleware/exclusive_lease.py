"""Exclusive leases of actors: one run at a time, across all processes and machines."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import redis
from dramatiq import Actor, Broker, MessageProxy, Middleware

from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.middleware_errors import InvalidOption, Requeue, Skip, fail_message_on_error
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.thread_interrupt import LostLease, run_interruptibly
from housekeeping.leases.lease import (
    SHORTEST_TTL,
    ExclusiveLease,
    LeaseStore,
    RedisLeaseStore,
    current_lease,
)
from housekeeping.leases.lease_token import holder_of
from housekeeping.middleware.call_keys import bind_call, check_key, key_value

logger = named_logger(__name__)

_EXAMPLE: Final = '{"key": "reports/nightly", "ttl": timedelta(minutes=10), "if_held": "skip"}'

_RETRY_MARGIN: Final = timedelta(seconds=1)  # between the end of a held lease and the next attempt


class _ThreadState(threading.local):
    # By thread, not by message id: a redelivered message has the id of the run it duplicates.
    lease: ExclusiveLease | None = None


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

    def __init__(self, store: redis.Redis | LeaseStore, namespace: str) -> None:
        self._store: LeaseStore = RedisLeaseStore(store, namespace) if isinstance(store, redis.Redis) else store
        self._thread = _ThreadState()

    @property
    def actor_options(self) -> set[str]:
        return {"exclusive_lease"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        option = actor.options.get("exclusive_lease")
        if option is None:
            return
        name = actor.actor_name
        if not isinstance(option, dict) or not {"key", "ttl"} <= set(option) <= {"key", "ttl", "if_held"}:
            raise InvalidOption(f"{name}: exclusive_lease is {option!r}; it should be such as {_EXAMPLE}")
        if option.get("if_held", "skip") not in ("skip", "retry"):
            raise InvalidOption(f'{name}: if_held is {option["if_held"]!r}; it should be "skip" or "retry"')
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

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        option = broker.get_actor(message.actor_name).options.get("exclusive_lease")
        if option is None:
            return
        with fail_message_on_error():
            lease = ExclusiveLease(_key(broker, message, option["key"]), option["ttl"], self._store)
            if lease.try_obtain() is not None:
                self._thread.lease = lease
                current_lease.set(lease)
                lease.start_renewal(interrupting=True)
                return
            remaining = lease.remaining() or timedelta()
            holder = holder_of(lease.owner())
            held_for = holder.held_for or timedelta()
        logger.info(
            "Lease is held elsewhere",
            lease=lease.key,
            held_for_s=round(held_for.total_seconds(), 1),
            reason="lease_held",
        )
        # Held by its own killed attempt, or one that seems killed: dropping the message would lose its work.
        if option.get("if_held") == "retry" or holder.message_id == message.message_id:
            raise Requeue(f"lease {lease.key!r} is held", min(remaining + _RETRY_MARGIN, option["ttl"]))
        raise Skip("lease_held")

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        lease = self._forget()
        if lease is None:
            return
        lost = lease.lost
        try:
            kept = lease.cancel()
        except RedisUnavailable as error:
            logger.warning("Lease could not be released", lease=lease.key, error=str(error))
            return
        if lost or not kept:
            logger.warning("Lease was lost before its run ended", lease=lease.key, reason="lost_lease")

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self.after_process_message(broker, message)

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

    def _forget(self) -> ExclusiveLease | None:
        lease, self._thread.lease = self._thread.lease, None
        current_lease.set(None)
        return lease


def _key(broker: Broker, message: MessageProxy, key: str | Callable[..., object]) -> str:
    if isinstance(key, str):
        return key
    actor = broker.get_actor(message.actor_name)
    return str(key_value(actor, bind_call(actor, message.args, message.kwargs), key))
