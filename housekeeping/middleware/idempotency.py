"""Idempotency: a completed message is not executed again, and no message runs twice at the same time."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.middleware import MiddlewareError

from housekeeping.core.middleware_errors import InvalidOption, Requeue, SkipDelivery, fail_message_on_error
from housekeeping.core.redis.client import milliseconds, text, translate_redis_errors
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.thread_interrupt import LostLease, interrupter
from housekeeping.leases.renewal import SHORTEST_TTL, Renewal, elapsed, safe_until
from housekeeping.leases.renewal_threads import renewals
from housekeeping.leases.store import RedisLeaseStore
from housekeeping.middleware.deduplication.options import DEDUP_STATE, LIFE, RETRY_WAITS, SECOND_DELIVERY, SUPERSEDED

logger = named_logger(__name__)

DEFAULT_TTL: Final = timedelta(hours=24)  # docs/reference/actor-options.md
#: How long the mark of a running message outlives its process. Less than the broker's heartbeat timeout (60 s), so that
#: a redelivery after a kill finds it expired.
RUNNING_TTL: Final = timedelta(seconds=30)
_RUNNING_DELAY: Final = timedelta(seconds=5)  # before a second delivery checks again

#: Begin a delivery. KEYS: the completion, the running mark, the number of the last enqueued retry. ARGV: this
#: delivery's token, the mark's TTL in ms, the number of this retry. Returns "completed", "retried", or the token of the
#: running delivery, which may be this one. Repeated by the running delivery, it renews the mark.
_BEGIN: Final = """
if redis.call("exists", KEYS[1]) == 1 then return "completed" end
if tonumber(redis.call("get", KEYS[3]) or "0") > tonumber(ARGV[3]) then return "retried" end
local running = redis.call("get", KEYS[2])
if running and running ~= ARGV[1] then return running end
redis.call("set", KEYS[2], ARGV[1], "px", ARGV[2])
return ARGV[1]
"""
#: End a delivery. ARGV: its token, the TTL in ms of the completion, whether it was completed, else the number of its
#: retry (0: none).
_END: Final = """
if ARGV[3] == "1" then
    redis.call("set", KEYS[1], "1", "px", ARGV[2])
    redis.call("del", KEYS[3])
elseif ARGV[4] ~= "0" then
    redis.call("set", KEYS[3], ARGV[4], "px", ARGV[2])
end
if redis.call("get", KEYS[2]) == ARGV[1] then redis.call("del", KEYS[2]) end
"""


@dataclass(slots=True)
class _Delivery:
    """Delivery of a message that this thread runs.

    Attributes:
      keys: Redis keys that the Lua scripts use.
      retry: Number of this retry; 0 for the first attempt.
      enqueued_as: Number of the retry that was enqueued after this delivery; 0 if there is none.
      since: Reading of `elapsed` when the start was sent to Redis.
      sure_until: Reading of `elapsed` until which its running mark is certain to exist.
      renewal: Renewal of its running mark.
    """

    name: str
    token: str
    keys: list[str]
    retry: int
    since: float
    sure_until: float
    enqueued_as: int = 0
    renewal: Renewal | None = None
    ended: bool = False
    renewing: threading.Lock = field(default_factory=threading.Lock)

    def renew(self, step: Callable[[], bool]) -> bool:
        """Call the function unless the delivery has ended. `end` waits while it runs."""
        with self.renewing:
            return self.ended or step()

    def end(self) -> None:
        """Stop the renewal, so that it does not write the running mark again after its deletion."""
        with self.renewing:
            self.ended = True


class _ThreadState(threading.local):
    # By thread, not by message id: a second delivery has the id of the run it duplicates.
    delivery: _Delivery | None = None


class Idempotency(Middleware):
    """Middleware that executes a message once, however often the broker delivers it.

    An actor opts in. Messages with the same ``idempotency_key`` are executed once as well::

        @dramatiq.actor(idempotent=True, idempotency={"ttl": timedelta(days=7)})
        def charge(order_id: int) -> None: ...

        charge.send_with_options(args=(7,), idempotency_key="order-7")

    The completion is written after the actor has returned. If the process is killed in between, the message is executed
    once more. The same happens if a process is suspended for longer than its running mark lives (30 s). If another
    delivery is running when it wakes, `LostLease` ends its own run, or keeps it from starting.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._prefix = namespace
        self._marks = RedisLeaseStore(client, namespace, kind="running")
        self._begin: Any = client.register_script(_BEGIN)
        self._thread = _ThreadState()

    @property
    def actor_options(self) -> set[str]:
        return {"idempotent", "idempotency"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        if not isinstance(actor.options.get("idempotent", False), bool):
            raise InvalidOption(
                f"{actor.actor_name}: idempotent is {actor.options['idempotent']!r}; it should be True or False"
            )
        option = actor.options.get("idempotency")
        if actor.options.get("idempotent"):
            actor.fn = self._check_mark_first(actor.fn)
        if option is None:
            return
        ttl = option.get("ttl") if isinstance(option, dict) and set(option) == {"ttl"} else None
        if not isinstance(ttl, timedelta) or ttl < SHORTEST_TTL:
            raise InvalidOption(
                f"{actor.actor_name}: idempotency is {option!r}; "
                'it should be such as {"ttl": timedelta(hours=24)}, of at least 3 seconds'
            )
        if not actor.options.get("idempotent"):
            raise InvalidOption(f"{actor.actor_name}: idempotency needs idempotent=True beside it")

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        actor = broker.actors.get(message.actor_name)
        # Only a new message is refused: its sender gets the error. One that is due or retried has no sender.
        new = DEDUP_STATE not in message.options
        if new and actor is not None and "idempotency_key" in message.options and not actor.options.get("idempotent"):
            raise InvalidOption(f"{actor.actor_name}: idempotency_key needs an actor with idempotent=True")
        delivery = self._thread.delivery
        if delivery is not None and delivery.token.startswith(f"{message.message_id}:"):
            delivery.enqueued_as = _retry_number(message)

    def prepare(self, actor: Actor[..., Any], message: MessageProxy) -> tuple[list[str], list[Any]] | None:
        """Return keys and arguments for the script that begins the delivery; None if the actor is not idempotent."""
        self._end_delivery()  # an interrupted hook may have left one
        if not actor.options.get("idempotent"):
            return None
        # The token begins with the id, so that a second delivery of the message can recognize itself.
        name, token = self._name(message), f"{message.message_id}:{uuid4().hex}"
        since = elapsed()
        sure_until = safe_until(since, RUNNING_TTL.total_seconds())
        delivery = _Delivery(name, token, self._keys(name, message), _retry_number(message), since, sure_until)
        self._thread.delivery = delivery
        return delivery.keys, [token, milliseconds(RUNNING_TTL), delivery.retry]

    def refusal(self, state: str, message: MessageProxy) -> MiddlewareError | None:
        """Start to renew the running mark if the message may run, else return the error that drops or requeues it."""
        delivery = self._thread.delivery
        assert delivery is not None
        if state == delivery.token:
            delivery.renewal = renewals.start(
                f"mark of {delivery.name}",
                lambda: delivery.renew(lambda: self._renew_mark(delivery)),
                RUNNING_TTL,
                delivery.since,
                interrupter(LostLease),
                recoverable=True,
            )
            return None
        self._end_delivery()
        if state == "completed":
            logger.info("Message was completed before", job_status="already_done")
            return SkipDelivery("already_done")
        if state == "retried":
            # A failed attempt was delivered again. If it ran again, it would be retried twice.
            message.options[DEDUP_STATE] = SUPERSEDED
            logger.info("Delivery dropped, because its retry is waiting", job_status=RETRY_WAITS)
            return SkipDelivery(RETRY_WAITS)
        if state.startswith(f"{message.message_id}:"):
            message.options[DEDUP_STATE] = SECOND_DELIVERY
        return Requeue(f"{delivery.name} is running elsewhere", _RUNNING_DELAY)

    def end(
        self, actor: Actor[..., Any], message: MessageProxy, *, completed: bool
    ) -> tuple[list[str], list[Any]] | None:
        """Return keys and arguments for the script that ends this thread's delivery; None without one."""
        delivery = self._end_delivery()
        if delivery is None:
            return None
        option = actor.options.get("idempotency") or {}
        # Not the number in the message: Dramatiq also counts a retry that it does not make, and callbacks see that.
        retry = 0 if completed or message.failed else delivery.enqueued_as
        return delivery.keys, [delivery.token, milliseconds(option.get("ttl", DEFAULT_TTL)), int(completed), retry]

    def redis_keys(self) -> tuple[str, str]:
        """Return the Redis keys of completion and running mark of this thread's delivery; empty without a delivery."""
        delivery = self._thread.delivery
        return ("", "") if delivery is None else (delivery.keys[0], delivery.keys[1])

    def _check_mark_first(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            delivery = self._thread.delivery
            if delivery is not None and not self._mark_is_valid(delivery):
                with fail_message_on_error():
                    may_continue = delivery.renew(lambda: self._renew_mark(delivery))
                if not may_continue:
                    raise Requeue(f"{delivery.name} was taken over while this process was stopped", _RUNNING_DELAY)
            return function(*args, **kwargs)

        return run

    @staticmethod
    def _mark_is_valid(delivery: _Delivery) -> bool:
        return elapsed() <= delivery.sure_until and not (delivery.renewal is not None and delivery.renewal.lost)

    def _renew_mark(self, delivery: _Delivery) -> bool:
        """Renew the running mark; return whether this delivery may continue.

        After the mark has expired, another delivery may have started or completed the message.
        """
        began_at = elapsed()
        if self._mark_is_valid(delivery):
            mine = self._renew_or_restore(delivery.name, delivery.token)
        else:
            with translate_redis_errors():
                mine = self._begin_script(delivery) == delivery.token
        if mine:
            delivery.sure_until = safe_until(began_at, RUNNING_TTL.total_seconds())
        return mine

    def _begin_script(self, delivery: _Delivery) -> str:
        return text(self._begin(keys=delivery.keys, args=[delivery.token, milliseconds(RUNNING_TTL), delivery.retry]))

    def _renew_or_restore(self, name: str, token: str) -> bool:
        """Renew the mark, or write it again if Redis lost it and no other delivery runs."""
        return self._marks.obtain(name, token, RUNNING_TTL) == token

    def _end_delivery(self) -> _Delivery | None:
        delivery, self._thread.delivery = self._thread.delivery, None
        if delivery is not None and delivery.renewal is not None:
            renewals.stop(delivery.renewal)
            delivery.end()
        return delivery

    def _name(self, message: MessageProxy) -> str:
        key = message.options.get("idempotency_key")
        # A digest, because an application's key may contain the separator.
        what = message.message_id if key is None else hashlib.sha256(str(key).encode()).hexdigest()[:32]
        return f"{message.actor_name}:{what}"

    def _keys(self, name: str, message: MessageProxy) -> list[str]:
        # Retries are counted by the message's id, not by the application's key. A requeued dead letter counts from 0.
        life = f"{message.actor_name}:{message.message_id}:{message.options.get(LIFE, '')}"
        return [f"{self._prefix}:done:{name}", f"{self._prefix}:running:{name}", f"{self._prefix}:retried:{life}"]


def _retry_number(message: Message[Any] | MessageProxy) -> int:
    retries = message.options.get("retries", 0)
    return retries if isinstance(retries, int) else 0
