"""Keeps the dead letters of a failing schedule from piling up."""

from __future__ import annotations

from typing import Any, Final

from dramatiq import Broker, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import q_name

KEPT: Final = 10  # dead letters of a scheduled actor; semantics.md, R1

#: KEYS: the actor's list of dead letters, newest first; Dramatiq's sorted set and hash of the queue's.
#: ARGV: the newest, how many to keep, the ttl in ms. Those that were requeued or purged do not count.
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


class DeadLetters(Middleware):
    """Middleware that keeps the last 10 dead letters of each scheduled actor: they are all the same work.

    Those of other actors stay as long as the broker keeps them. Only for Dramatiq's Redis broker.
    """

    def after_nack(self, broker: Broker, message: MessageProxy) -> None:
        actor = broker.actors.get(message.actor_name)
        if not isinstance(broker, RedisBroker) or actor is None or "periodic" not in actor.options:
            return
        dead = f"{broker.namespace}:{q_name(message.queue_name)}.XQ"
        keep_the_last: Any = broker.client.register_script(_KEEP_THE_LAST)
        keep_the_last(
            keys=[f"{broker.namespace}:__dead__.{actor.actor_name}", dead, f"{dead}.msgs"],
            args=[message.options["redis_message_id"], KEPT, broker.dead_message_ttl],
        )
