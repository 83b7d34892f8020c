"""Completion of dead letters: they contain their last error, and a scheduled actor keeps only its last ten."""

from __future__ import annotations

import threading
import traceback
from typing import Any, Final

from dramatiq import Broker, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import q_name

from housekeeping.core.telemetry import metrics
from housekeeping.middleware.dramatiq_internals import exception_of

KEPT: Final = 10  # dead letters of a scheduled actor; promise R1
_MAX_FRAMES: Final = 30  # of a traceback, as many as Dramatiq keeps for a retry

#: KEYS: the actor's list of dead letters, newest first; Dramatiq's sorted set and hash of the queue's dead letters.
#: ARGV: the newest, the number to keep, the TTL in ms. Requeued and purged dead letters do not count.
_KEEP_THE_LAST: Final = """
local kept = 0
local ids = redis.call("lrange", KEYS[1], 0, -1)
table.insert(ids, 1, ARGV[1])
redis.call("del", KEYS[1])
for _, id in ipairs(ids) do
    if redis.call("zscore", KEYS[2], id) then
        if kept < tonumber(ARGV[2]) then
            redis.call("rpush", KEYS[1], id)
            kept = kept + 1
        else
            redis.call("zrem", KEYS[2], id)
            redis.call("hdel", KEYS[3], id)
        end
    end
end
redis.call("pexpire", KEYS[1], ARGV[3])
"""
#: KEYS: Dramatiq's hash of the queue's messages. ARGV: the message's id in Redis, its new body.
_REWRITE: Final = """
if redis.call("hexists", KEYS[1], ARGV[1]) == 1 then redis.call("hset", KEYS[1], ARGV[1], ARGV[2]) end
"""


class _ThreadState(threading.local):
    #: The id of the running message, and the number of its retries and its traceback when it started.
    attempt: tuple[str, int | None, str | None] = ("", None, None)


class DeadLetters(Middleware):
    """Middleware that completes dead letters and limits their number.

    A dead letter contains the error of its last attempt and the number of retries that were made. Dramatiq's own dead
    letters contain the error of the attempt before, and count one retry more. The last 10 of each scheduled actor are
    kept, because they are all the same work. Those of other actors stay as long as the broker keeps them.

    Note: On RabbitMQ all are kept as long as the broker keeps them, because it cannot remove a single dead letter.
    """

    def __init__(self) -> None:
        self._thread = _ThreadState()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        options = message.options
        self._thread.attempt = (message.message_id, options.get("retries"), options.get("traceback"))

    def before_nack(self, broker: Broker, message: MessageProxy) -> None:
        message_id, retries, before = self._thread.attempt
        if message_id == message.message_id and "retries" in message.options:
            message.options["retries"] = retries or 0
        error = exception_of(message)
        if error is None:
            return
        written = message.options.get("traceback")
        # Formatting a traceback is slow, so one that Dramatiq's retries have written for this error is kept.
        if not written or written == before or not written.endswith(traceback.format_exception_only(error)[-1]):
            message.options["traceback"] = "".join(traceback.format_exception(error, limit=_MAX_FRAMES))
        redis_id = message.options.get("redis_message_id")
        if isinstance(broker, RedisBroker) and redis_id and not hasattr(broker, "rewrites_dead_letters"):
            rewrite: Any = broker.client.register_script(_REWRITE)
            rewrite(keys=[f"{broker.namespace}:{message.queue_name}.msgs"], args=[redis_id, message.encode()])

    def after_nack(self, broker: Broker, message: MessageProxy) -> None:
        metrics.DEAD_LETTERS.add(message.actor_name)
        actor = broker.actors.get(message.actor_name)
        if not isinstance(broker, RedisBroker) or actor is None:
            return
        # A shard of a sweep is sent at each tick of the sweep's own actor.
        if "periodic" not in actor.options and getattr(actor.options.get("sweep"), "schedule", None) is None:
            return
        dead = f"{broker.namespace}:{q_name(message.queue_name)}.XQ"
        keep_the_last: Any = broker.client.register_script(_KEEP_THE_LAST)
        keep_the_last(
            keys=[f"{broker.namespace}:__dead__.{actor.actor_name}", dead, f"{dead}.msgs"],
            args=[message.options["redis_message_id"], KEPT, broker.dead_message_ttl],
        )
