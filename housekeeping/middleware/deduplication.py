"""At most one live message for the same work: duplicates are dropped where they are sent."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Final

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.middleware import SkipMessage

from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.redis_client import reaching_redis
from housekeeping.foundation.renewal import Kept, renewals
from housekeeping.foundation.steering import PutBack, SkipEnqueue, failing_the_message
from housekeeping.middleware.arguments import digest
from housekeeping.middleware.deduplication_options import KEY_VERSION, Terms, check_options, terms_of

logger = named_logger(__name__)

#: A key whose message never reached the queue (the process died in between) blocks nothing for longer.
_RESERVED_FOR: Final = timedelta(seconds=5)
_TURN: Final = timedelta(seconds=5)  # how long a message waits that finds its key in use by a running one

#: A key is a hash: id (of the message that holds it), state (reserved, waiting, running), again (one more run).
#: ARGV: message id, ttl in ms, whether to ask for one more run. Returns the holder's id, "" when it is ours.
_RESERVE: Final = """
local holder = redis.call("hget", KEYS[1], "id")
if holder and holder ~= ARGV[1] then
    if ARGV[3] == "1" and redis.call("hget", KEYS[1], "state") == "running" then
        redis.call("hset", KEYS[1], "again", "1")
    end
    return holder
end
redis.call("hset", KEYS[1], "id", ARGV[1], "state", "reserved")
redis.call("pexpire", KEYS[1], ARGV[2])
return ""
"""
#: ARGV: message id, ttl in ms. A worker may have been quicker than the sender: then there is nothing to confirm.
_CONFIRM: Final = """
if redis.call("hget", KEYS[1], "id") ~= ARGV[1] then return end
if redis.call("hget", KEYS[1], "state") ~= "reserved" then return end
redis.call("hset", KEYS[1], "state", "waiting")
redis.call("pexpire", KEYS[1], ARGV[2])
"""
#: ARGV: message id, ttl in ms, whether the key is kept while running. Returns "ours", or the other holder's state.
_START: Final = """
local holder = redis.call("hget", KEYS[1], "id")
if holder and holder ~= ARGV[1] then
    if redis.call("hget", KEYS[1], "state") == "running" then return "running" end
    return "waiting"
end
if ARGV[3] == "0" then redis.call("del", KEYS[1]) return "ours" end
redis.call("hset", KEYS[1], "id", ARGV[1], "state", "running")
redis.call("pexpire", KEYS[1], ARGV[2])
return "ours"
"""
_RENEW: Final = """
if redis.call("hget", KEYS[1], "id") ~= ARGV[1] then return 0 end
return redis.call("pexpire", KEYS[1], ARGV[2])
"""
#: Returns whether one more run was asked for.
_RELEASE: Final = """
if redis.call("hget", KEYS[1], "id") ~= ARGV[1] then return 0 end
local again = redis.call("hget", KEYS[1], "again")
redis.call("del", KEYS[1])
return again and 1 or 0
"""


class Deduplication(Middleware):
    """Middleware that keeps at most one message of a key alive.

    An idempotent actor opts in to more than the default, ``until_executing``::

        @dramatiq.actor(idempotent=True, deduplicate="until_executed", deduplication={"ttl": timedelta(hours=6)})
        def sweep(project_id: int) -> None: ...

    ``until_executing``: at most one waits to start. ``until_executed``: at most one waits, runs, or waits for a
    retry. A dropped message is returned to its sender marked with ``options["duplicate_of"]``. With
    ``"if_deduplicated": "reschedule_once"`` a duplicate that arrives while the holder runs makes one more run.
    A key belongs to a message; nobody else frees or renews it.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._prefix = f"{namespace}:dedup:{KEY_VERSION}:"
        self._reserve: Any = client.register_script(_RESERVE)
        self._confirm: Any = client.register_script(_CONFIRM)
        self._start: Any = client.register_script(_START)
        self._renew: Any = client.register_script(_RENEW)
        self._release: Any = client.register_script(_RELEASE)
        self._running = threading.local()

    @property
    def actor_options(self) -> set[str]:
        return {"deduplicate", "deduplication"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        check_options(actor)

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        actor = broker.get_actor(message.actor_name)
        terms = terms_of(actor)
        if terms is None or not terms.claimed_when_enqueued(message, delay):
            return
        again = "1" if terms.reschedule_once else "0"
        key = self._key(actor, message, terms)
        with failing_the_message():
            holder = _text(self._reserve(keys=[key], args=[message.message_id, _ms(_RESERVED_FOR), again]))
        if holder and not terms.waited_for(message):
            raise SkipEnqueue("deduplicated", duplicate_of=holder)

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        actor = broker.get_actor(message.actor_name)
        terms = terms_of(actor)
        if terms is not None and terms.claimed_when_enqueued(message, delay):
            ttl = terms.ttl + timedelta(milliseconds=delay or 0)
            with reaching_redis():
                self._confirm(keys=[self._key(actor, message, terms)], args=[message.message_id, _ms(ttl)])

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        actor = broker.get_actor(message.actor_name)
        terms = terms_of(actor)
        if terms is None:
            return
        key, message_id = self._key(actor, message, terms), message.message_id
        with failing_the_message():
            kept_while_running = "1" if terms.until_executed else "0"
            state = _text(self._start(keys=[key], args=[message_id, _ms(terms.ttl), kept_while_running]))
        if state == "ours":
            if terms.until_executed:
                self._running.kept = renewals.keep(
                    f"key {key}", lambda: self._still_ours(key, message_id, terms.ttl), terms.ttl
                )
        elif not terms.waited_for(message):
            if state == "running":
                raise PutBack(f"{message_id} waits for the run that holds its key", _TURN)
            logger.info("Message yields to the one that waits with its key", job_status="deduplicated")
            raise SkipMessage(f"{message_id} is a duplicate")

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._end(broker, message, retried=exception is not None and not message.failed, unstarted=message.failed)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self._end(broker, message, retried=False, unstarted=True)

    def _end(self, broker: Broker, message: MessageProxy, *, retried: bool, unstarted: bool) -> None:
        """Free the key, however the message ended; `unstarted`: it may hold one though it never ran."""
        kept: Kept | None = getattr(self._running, "kept", None)
        self._running.kept = None
        if kept is not None:
            kept.stop()
        # A retry has the message's id, so it holds the key already: enqueueing it renewed the ttl.
        if retried or (kept is None and not unstarted):
            return
        actor = broker.get_actor(message.actor_name)
        terms = terms_of(actor)
        if terms is None:
            return
        with reaching_redis():
            again = self._release(keys=[self._key(actor, message, terms)], args=[message.message_id])
        if again:
            actor.send(*message.args, **message.kwargs)

    def _still_ours(self, key: str, message_id: str, ttl: timedelta) -> bool:
        with reaching_redis():
            return bool(self._renew(keys=[key], args=[message_id, _ms(ttl)]))

    def _key(self, actor: Actor[..., Any], message: Message[Any] | MessageProxy, terms: Terms) -> str:
        return f"{self._prefix}{actor.actor_name}:{digest(actor, message.args, message.kwargs, terms.key)}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _ms(length: timedelta) -> int:
    return int(length.total_seconds() * 1000)
