"""Group callbacks that count each message of a group once and are never lost."""

from __future__ import annotations

from typing import Any, Final

import dramatiq.middleware
from dramatiq import Broker, Message, MessageProxy
from dramatiq.rate_limits.backends import RedisBackend

from housekeeping.middleware.reliable_enqueue import retry_until_available, waiting_for_broker

#: Count a message and return 1 if it is the last one of its group, else 0. A repeated call returns the same.
#: KEYS: the number of messages left, as Dramatiq's barrier stores it; the results of the counted messages.
#: ARGV: the message id, the TTL in ms.
_COUNT: Final = """
local answered = redis.call("hget", KEYS[2], ARGV[1])
if answered then return tonumber(answered) end
local left = tonumber(redis.call("get", KEYS[1]) or "0") - 1
local last = left < 1 and 1 or 0
if last == 0 then redis.call("set", KEYS[1], left, "px", ARGV[2]) end
redis.call("hset", KEYS[2], ARGV[1], last)
redis.call("pexpire", KEYS[2], ARGV[2])
return last
"""


def reliable_groups(given: dramatiq.middleware.GroupCallbacks) -> dramatiq.middleware.GroupCallbacks:
    """Make the application's group callbacks lose nothing, and on Redis count no message twice."""
    backend = given.rate_limiter_backend
    if type(given) is dramatiq.middleware.GroupCallbacks and isinstance(backend, RedisBackend):
        given = GroupCallbacks(given, backend)
    return waiting_for_broker(given)


class GroupCallbacks(dramatiq.middleware.GroupCallbacks):
    """Group callbacks that count each message of a group exactly once.

    Dramatiq's class skips a message that ends while Redis is down. The group then never ends. It also counts a
    redelivered message twice. The group then ends too early.

    Parameters:
      given: The application's middleware, whose TTL is kept.
      backend: Its Redis backend.
    """

    def __init__(self, given: dramatiq.middleware.GroupCallbacks, backend: RedisBackend) -> None:
        # Not by super().__init__, which would warn a second time about Dramatiq's environment variable.
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
            lambda: self._is_last(group, message.message_id), "Group member cannot be counted yet, tried again"
        ):
            for callback in callbacks:
                broker.enqueue(Message(**callback))

    def _is_last(self, group: str, message_id: str) -> bool:
        # The braces put the second key into the first one's cluster slot. A script's keys must be in one slot.
        return bool(self._count(keys=[group, f"{{{group}}}@counted"], args=[message_id, self.barrier_ttl]))
