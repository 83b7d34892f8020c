"""A message that was completed is not executed again, nor twice at the same time."""

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

from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.middleware_errors import InvalidOption, Requeue, Skip, fail_message_on_error
from housekeeping.core.redis_client import milliseconds, retry_redis, text, translate_redis_errors
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.thread_interrupt import LostLease, interrupter
from housekeeping.leases.lease import SHORTEST_TTL, RedisLeaseStore
from housekeeping.leases.renewal import Renewal, elapsed, renewals, safe_until
from housekeeping.middleware.deduplication.options import DEDUP_STATE, LIFE, RETRY_WAITS, SECOND_DELIVERY, SUPERSEDED

logger = named_logger(__name__)

DEFAULT_TTL: Final = timedelta(hours=24)  # docs/reference/actor-options.md
#: The mark of a message at work outlives its process by this long: less than the broker's heartbeat
#: timeout (60 s), so that a redelivery after a kill finds it gone.
_RUNNING_TTL: Final = timedelta(seconds=30)
_TURN: Final = timedelta(seconds=5)  # how long a second delivery waits before it looks again

#: KEYS: the completion, the mark of being at work, the number of the last retry that is in the queue. ARGV: this
#: delivery's token, the mark's ttl in ms, the number of the retry that it is.
#: Returns "completed", "retried", this delivery's token, or the token of the one that is at work. Asked again by that
#: one, it renews the mark.
_BEGIN: Final = """
if redis.call("exists", KEYS[1]) == 1 then return "completed" end
if tonumber(redis.call("get", KEYS[3]) or "0") > tonumber(ARGV[3]) then return "retried" end
local at_work = redis.call("get", KEYS[2])
if at_work and at_work ~= ARGV[1] then return at_work end
redis.call("set", KEYS[2], ARGV[1], "px", ARGV[2])
return ARGV[1]
"""
#: ARGV: this delivery's token, the ttl in ms of what is remembered, whether it was completed, and if not the number of
#: its retry (0: none).
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
class _Begun:
    """The delivery that this thread is at work on.

    Attributes:
      keys: Those of the scripts.
      retry: The number of the retry that it is.
      enqueued_as: The number of the retry as which its message was enqueued again; 0: it was not, or is no retry.
      sure_until: Until when its mark cannot have expired, by `elapsed`.
    """

    name: str
    token: str
    keys: list[str]
    retry: int
    sure_until: float
    enqueued_as: int = 0
    kept: Renewal | None = None
    over: bool = False
    renewing: threading.Lock = field(default_factory=threading.Lock)

    def renew(self, step: Callable[[], bool]) -> bool:
        """Take a step of renewal, unless the delivery has ended; `end` waits for one that is under way."""
        with self.renewing:
            return self.over or step()

    def end(self) -> None:
        """Let no step of renewal begin from now on: it would make the mark again once it is taken away."""
        with self.renewing:
            self.over = True


class _ThreadState(threading.local):
    # By thread, not by message id: a second delivery has the id of the run it duplicates.
    begun: _Begun | None = None


class Idempotency(Middleware):
    """Middleware that executes a message once, however often the broker delivers it.

    An actor opts in; an application may name what must happen once::

        @dramatiq.actor(idempotent=True, idempotency={"ttl": timedelta(days=7)})
        def charge(order_id: int) -> None: ...

        charge.send_with_options(args=(7,), idempotency_key="order-7")

    The completion is written after the actor has returned. A process killed in between leaves none: an actor
    without a row in the run ledger is then executed once more. So it is while a process is stopped for longer than
    its mark lives (30 s); when that one wakes and finds another delivery at work, its own run is ended by `LostLease`.
    Stopped before its actor began, it does not begin.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._prefix = namespace
        self._marks = RedisLeaseStore(client, namespace, kind="running")
        self._begin: Any = client.register_script(_BEGIN)
        self._end: Any = client.register_script(_END)
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
            actor.fn = self._unless_taken_over(actor.fn)
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
        if actor is not None and "idempotency_key" in message.options and not actor.options.get("idempotent"):
            raise InvalidOption(f"{actor.actor_name}: idempotency_key needs an actor with idempotent=True")
        begun = self._thread.begun
        if begun is not None and begun.token.startswith(f"{message.message_id}:"):
            begun.enqueued_as = _retry_number(message)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        self._forget()  # what an interrupted hook may have left
        if not broker.get_actor(message.actor_name).options.get("idempotent"):
            return
        with fail_message_on_error():
            # The id first, so that a second delivery of a message can tell that it is one.
            name, token = self._name(message), f"{message.message_id}:{uuid4().hex}"
            since = elapsed()
            sure_until = safe_until(since, _RUNNING_TTL.total_seconds())
            begun = _Begun(name, token, self._keys(name, message), _retry_number(message), sure_until)
            # Known before it is asked for: should the answer get lost, the mark is taken away when the message fails.
            self._thread.begun = begun
            state = self._asked(begun)
            if state == token:
                begun.kept = renewals.start(
                    f"mark of {name}",
                    lambda: begun.renew(lambda: self._goes_on(begun)),
                    _RUNNING_TTL,
                    since,
                    interrupter(LostLease),
                    recoverable=True,
                )
                return
        self._forget()
        if state == "completed":
            logger.info("Message was completed before", job_status="already_done")
            raise Skip("already_done")
        if state == "retried":
            # An attempt that failed is delivered again: run once more it would be retried once more, beside its retry.
            message.options[DEDUP_STATE] = SUPERSEDED
            logger.info("Delivery dropped, because its retry is waiting", job_status=RETRY_WAITS)
            raise Skip(RETRY_WAITS)
        if state.startswith(f"{message.message_id}:"):
            message.options[DEDUP_STATE] = SECOND_DELIVERY
        raise Requeue(f"{name} is at work elsewhere", _TURN)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._finish(broker, message, completed=exception is None and not message.failed)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self._finish(broker, message, completed=False)

    def _finish(self, broker: Broker, message: MessageProxy, *, completed: bool) -> None:
        begun = self._forget()
        if begun is None:
            return
        option = broker.get_actor(message.actor_name).options.get("idempotency") or {}
        # Not the number in the message: Dramatiq counts a retry that is not made, too, and callbacks get to see that.
        retry = 0 if completed or message.failed else begun.enqueued_as
        args = [begun.token, milliseconds(option.get("ttl", DEFAULT_TTL)), int(completed), retry]
        try:
            retry_redis(lambda: self._end(keys=begun.keys, args=args))
        except RedisUnavailable as error:
            what = "Completion could not be recorded" if completed else "Running mark stays until it expires"
            logger.error(what, error=str(error))

    def mark(self) -> tuple[str, str] | None:
        """The key in Redis of the mark of this thread's delivery, and what it says; null where there is none."""
        begun = self._thread.begun
        return None if begun is None else (begun.keys[1], begun.token)

    def completion_key(self) -> str:
        """Return the key in Redis of the completion of this thread's delivery; empty if there is none."""
        begun = self._thread.begun
        return "" if begun is None else begun.keys[0]

    def _unless_taken_over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = self._thread.begun
            if begun is not None and not self._surely_ours(begun):
                with fail_message_on_error():
                    goes_on = begun.renew(lambda: self._goes_on(begun))
                if not goes_on:
                    raise Requeue(f"{begun.name} went on elsewhere while this process was stopped", _TURN)
            return function(*args, **kwargs)

        return run

    @staticmethod
    def _surely_ours(begun: _Begun) -> bool:
        return elapsed() <= begun.sure_until and not (begun.kept is not None and begun.kept.lost)

    def _goes_on(self, begun: _Begun) -> bool:
        """Whether this delivery may go on; renews its mark.

        Where the mark may have expired meanwhile, another delivery may even have done the work.
        """
        asked_at = elapsed()
        if self._surely_ours(begun):
            ours = self._still_ours(begun.name, begun.token)
        else:
            with translate_redis_errors():
                ours = self._asked(begun) == begun.token
        if ours:
            begun.sure_until = safe_until(asked_at, _RUNNING_TTL.total_seconds())
        return ours

    def _asked(self, begun: _Begun) -> str:
        return text(self._begin(keys=begun.keys, args=[begun.token, milliseconds(_RUNNING_TTL), begun.retry]))

    def _still_ours(self, name: str, token: str) -> bool:
        """Renew the mark, or make it again where it was lost and nobody else is at work."""
        return self._marks.obtain(name, token, _RUNNING_TTL) == token

    def _forget(self) -> _Begun | None:
        begun, self._thread.begun = self._thread.begun, None
        if begun is not None and begun.kept is not None:
            renewals.stop(begun.kept)
            begun.end()
        return begun

    def _name(self, message: MessageProxy) -> str:
        key = message.options.get("idempotency_key")
        # A digest, so that an application's key is not taken for another actor's, whatever it contains.
        what = message.message_id if key is None else hashlib.sha256(str(key).encode()).hexdigest()[:32]
        return f"{message.actor_name}:{what}"

    def _keys(self, name: str, message: MessageProxy) -> list[str]:
        # The message's own, whatever key an application gave it; one that was requeued begins anew.
        life = f"{message.actor_name}:{message.message_id}:{message.options.get(LIFE, '')}"
        return [f"{self._prefix}:done:{name}", f"{self._prefix}:running:{name}", f"{self._prefix}:retried:{life}"]


def _retry_number(message: Message[Any] | MessageProxy) -> int:
    retries = message.options.get("retries", 0)
    return retries if isinstance(retries, int) else 0
