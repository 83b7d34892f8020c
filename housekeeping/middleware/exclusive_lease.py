"""One run of an actor at a time, across all processes and machines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import redis
from dramatiq import Actor, Broker, MessageProxy, Middleware
from dramatiq.middleware import SkipMessage

from housekeeping.foundation.errors import RedisUnavailable
from housekeeping.foundation.leases import SHORTEST_TTL, ExclusiveLease, LeaseStore, RedisLeaseStore
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.steering import InvalidOption, PutBack, failing_the_message
from housekeeping.middleware.arguments import check_key

logger = named_logger(__name__)

_RIGHT: Final = '{"key": "reports/nightly", "ttl": timedelta(minutes=10), "if_held": "skip"}'


class ExclusiveLeases(Middleware):
    """Middleware that lets at most one run with a key proceed at a time.

    An actor opts in by naming the key, and how long it outlives a process that died::

        @dramatiq.actor(exclusive_lease={"key": "reports/nightly", "ttl": timedelta(minutes=10)})
        def publish() -> None: ...

    A message that finds the lease held is dropped, or with ``"if_held": "retry"`` comes back when the lease should
    have ended, without using up retries. The key may be a callable of the call's arguments. The lease is renewed
    while the run lives; a lost one is logged when the run ends.

    Note: An actor's run is not interrupted when its lease is lost; sweeps stop at their next batch.
    """

    def __init__(self, store: redis.Redis | LeaseStore, namespace: str) -> None:
        self._store: LeaseStore = RedisLeaseStore(store, namespace) if isinstance(store, redis.Redis) else store
        # By thread, not by message id: a redelivered message has the id of the run it duplicates.
        self._current = threading.local()

    @property
    def actor_options(self) -> set[str]:
        return {"exclusive_lease"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        option = actor.options.get("exclusive_lease")
        if option is None:
            return
        name = actor.actor_name
        if not isinstance(option, dict) or not {"key", "ttl"} <= set(option) <= {"key", "ttl", "if_held"}:
            raise InvalidOption(f"{name}: exclusive_lease is {option!r}; it should be such as {_RIGHT}")
        if option.get("if_held", "skip") not in ("skip", "retry"):
            raise InvalidOption(f'{name}: if_held is {option["if_held"]!r}; it should be "skip" or "retry"')
        if not isinstance(option["ttl"], timedelta) or option["ttl"] < SHORTEST_TTL:
            raise InvalidOption(f"{name}: ttl is {option['ttl']!r}; it should be a timedelta of at least 3 seconds")
        if callable(option["key"]):
            check_key(actor, "exclusive_lease", option["key"])
        elif not isinstance(option["key"], str) or not option["key"]:
            raise InvalidOption(f"{name}: key is {option['key']!r}; it should be a text or a callable of the arguments")

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        option = broker.get_actor(message.actor_name).options.get("exclusive_lease")
        if option is None:
            return
        key: str | Callable[..., str] = option["key"]
        lease = ExclusiveLease(
            str(key(*message.args, **message.kwargs)) if callable(key) else key, option["ttl"], self._store
        )
        with failing_the_message():
            if lease.try_obtain() is not None:
                lease.keep()
                self._current.lease = lease
                return
            remaining = lease.remaining() or timedelta()
        held_for = (lease.held_for() or timedelta()).total_seconds()
        logger.info("Lease is held elsewhere", lease=lease.key, held_for_s=round(held_for, 1), reason="lease_held")
        if option.get("if_held") == "retry":
            raise PutBack(f"lease {lease.key!r} is held", min(remaining + timedelta(seconds=1), option["ttl"]))
        raise SkipMessage(f"lease {lease.key!r} is held")

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        lease: ExclusiveLease | None = getattr(self._current, "lease", None)
        self._current.lease = None
        if lease is None:
            return
        lost = lease.lost
        try:
            kept = lease.cancel()
        except RedisUnavailable as error:
            logger.warning("Lease could not be given back", lease=lease.key, error=str(error))
            return
        if lost or not kept:
            logger.warning("Lease was lost before its run ended", lease=lease.key)

    after_skip_message = after_process_message
