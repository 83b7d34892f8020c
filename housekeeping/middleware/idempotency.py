"""A message that was completed is not executed again, nor twice at the same time."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import redis
from dramatiq import Actor, Broker, MessageProxy, Middleware
from dramatiq.middleware import SkipMessage

from housekeeping.foundation.leases import RedisLeaseStore
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.redis_client import reaching_redis
from housekeeping.foundation.renewal import Kept, renewals
from housekeeping.foundation.steering import InvalidOption, PutBack, failing_the_message

logger = named_logger(__name__)

DEFAULT_TTL: Final = timedelta(hours=24)  # semantics.md, Actor options
#: The mark of a message at work outlives its process by this long: less than the broker's heartbeat
#: timeout (60 s), so that a redelivery after a kill finds it gone.
_RUNNING_TTL: Final = timedelta(seconds=30)
_TURN: Final = timedelta(seconds=5)  # how long a second delivery waits before it looks again

#: KEYS: the completion, the mark of being at work. ARGV: this delivery's token, the mark's ttl in ms.
_BEGIN: Final = """
if redis.call("exists", KEYS[1]) == 1 then return "completed" end
if redis.call("set", KEYS[2], ARGV[1], "nx", "px", ARGV[2]) then return "begun" end
return "running"
"""
#: ARGV: this delivery's token, the completion's ttl in ms (0: not completed).
_END: Final = """
if tonumber(ARGV[2]) > 0 then redis.call("set", KEYS[1], "1", "px", ARGV[2]) end
if redis.call("get", KEYS[2]) == ARGV[1] then redis.call("del", KEYS[2]) end
"""


class Idempotency(Middleware):
    """Middleware that executes a message once, however often the broker delivers it.

    An actor opts in; an application may name what must happen once::

        @dramatiq.actor(idempotent=True, idempotency={"ttl": timedelta(days=7)})
        def charge(order_id: int) -> None: ...

        charge.send_with_options(args=(7,), idempotency_key="order-7")

    The completion is written after the actor has returned. A process killed in between leaves none: an actor
    without a row in the run ledger is then executed once more.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._prefix = namespace
        self._marks = RedisLeaseStore(client, namespace, kind="running")
        self._begin: Any = client.register_script(_BEGIN)
        self._end: Any = client.register_script(_END)
        # By thread, not by message id: a second delivery has the id of the run it duplicates.
        self._current = threading.local()

    @property
    def actor_options(self) -> set[str]:
        return {"idempotent", "idempotency"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        if not isinstance(actor.options.get("idempotent", False), bool):
            raise InvalidOption(f"{actor.actor_name}: idempotent should be True or False")
        option = actor.options.get("idempotency")
        if option is None:
            return
        ttl = option.get("ttl") if isinstance(option, dict) and set(option) == {"ttl"} else None
        if not isinstance(ttl, timedelta) or ttl <= timedelta():
            raise InvalidOption(
                f'{actor.actor_name}: idempotency is {option!r}; it should be {{"ttl": timedelta(hours=24)}}'
            )
        if not actor.options.get("idempotent"):
            raise InvalidOption(f"{actor.actor_name}: idempotency needs idempotent=True")

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        if not broker.get_actor(message.actor_name).options.get("idempotent"):
            return
        name, token = self._name(message), uuid4().hex
        with failing_the_message():
            state = _text(self._begin(keys=self._keys(name), args=[token, int(_RUNNING_TTL.total_seconds() * 1000)]))
        if state == "completed":
            logger.info("Message was completed before", job_status="already_done")
            raise SkipMessage(f"{message.message_id} was completed before")
        if state == "running":
            raise PutBack(f"{message.message_id} is at work elsewhere", _TURN)
        mark = f"{name}"
        kept = renewals.keep(f"mark of {name}", lambda: self._marks.renew(mark, token, _RUNNING_TTL), _RUNNING_TTL)
        self._current.begun = (name, token, kept)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._finish(broker, message, completed=exception is None and not message.failed)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self._finish(broker, message, completed=False)

    def _finish(self, broker: Broker, message: MessageProxy, *, completed: bool) -> None:
        begun: tuple[str, str, Kept] | None = getattr(self._current, "begun", None)
        self._current.begun = None
        if begun is None:
            return
        name, token, kept = begun
        kept.stop()
        options = broker.get_actor(message.actor_name).options
        ttl: timedelta = options.get("idempotency", {}).get("ttl", DEFAULT_TTL)
        with reaching_redis():
            self._end(keys=self._keys(name), args=[token, int(ttl.total_seconds() * 1000) if completed else 0])

    def _name(self, message: MessageProxy) -> str:
        return f"{message.actor_name}:{message.options.get('idempotency_key') or message.message_id}"

    def _keys(self, name: str) -> list[str]:
        return [f"{self._prefix}:done:{name}", f"{self._prefix}:running:{name}"]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
