"""Counts the messages of a group so that each counts once, and its callbacks are not lost."""

from __future__ import annotations

from typing import Any, Final

import dramatiq.middleware
from dramatiq import Broker, Message, MessageProxy
from dramatiq.rate_limits.backends import RedisBackend

from housekeeping.middleware.reliable_enqueue import patient, retry_until_available

#: KEYS: how many are awaited, as Dramatiq's barrier keeps it; which messages were counted, and what they were told.
#: ARGV: the message id, the ttl in ms. Returns whether it is the last one; the same however often it is asked.
_COUNT: Final = """
local told = redis.call("hget", KEYS[2], ARGV[1])
if told then return tonumber(told) end
local left = tonumber(redis.call("get", KEYS[1]) or "0") - 1
local last = left < 1 and 1 or 0
if last == 0 then redis.call("set", KEYS[1], left, "px", ARGV[2]) end
redis.call("hset", KEYS[2], ARGV[1], last)
redis.call("pexpire", KEYS[2], ARGV[2])
return last
"""


def counted(given: dramatiq.middleware.GroupCallbacks) -> dramatiq.middleware.GroupCallbacks:
    """The application's own callbacks of groups, made so that nothing is lost or counted twice where that can be."""
    backend = given.rate_limiter_backend
    if type(given) is dramatiq.middleware.GroupCallbacks and isinstance(backend, RedisBackend):
        given = GroupCallbacks(given, backend)
    return patient(given)


class GroupCallbacks(dramatiq.middleware.GroupCallbacks):
    """Dramatiq's callbacks at the end of a group, for a count that is kept on Redis.

    Dramatiq's own forgets to count a message that ends while Redis is away, so that its group never ends;
    and it counts one twice that is delivered twice, so that its group ends too early.

    Parameters:
      given: The application's own, whose backend and ttl are kept.
    """

    def __init__(self, given: dramatiq.middleware.GroupCallbacks, backend: RedisBackend) -> None:
        # Not by way of Dramatiq's, which would warn a second time of its environment variable.
        self.rate_limiter_backend = given.rate_limiter_backend
        self.barrier_ttl = given.barrier_ttl
        self._count: Any = backend.client.register_script(_COUNT)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        group = message.options.get("group_completion_uuid")
        callbacks = message.options.get("group_completion_callbacks")
        if exception is not None or message.failed or not (group and callbacks):
            return
        if retry_until_available(
            lambda: self._is_last(group, message.message_id), "A group's end cannot be counted yet"
        ):
            for callback in callbacks:
                broker.enqueue(Message(**callback))

    def _is_last(self, group: str, message_id: str) -> bool:
        # By its braces the second key is in the first one's slot of a cluster; a script's keys have to be in one.
        return bool(self._count(keys=[group, f"{{{group}}}@counted"], args=[message_id, self.barrier_ttl]))
