"""The keys of deduplication in Redis: one hash for each, every step one script and one round trip."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, Literal

import redis

from housekeeping.foundation.redis_client import reaching_redis

#: Part of every key: raised when the form of keys changes, so that old and new do not meet by accident.
KEY_VERSION: Final = "v1"

# Fields: `id`, the message that holds the key; `state`, reserved (its sender has not enqueued it yet), waiting or
# running; `run`, a token of the one delivery that runs; `again`, one more run is wanted after it.

#: ARGV: message id, state, ttl in ms, whether to ask for one more run. Returns the holder, "" when it is ours.
_CLAIM: Final = """
local holder = redis.call("hget", KEYS[1], "id")
local running = redis.call("hget", KEYS[1], "state") == "running"
if holder and holder ~= ARGV[1] then
    if ARGV[4] == "1" and running then redis.call("hset", KEYS[1], "again", "1") end
    return holder
end
if not running then
    redis.call("hset", KEYS[1], "id", ARGV[1], "state", ARGV[2])
    redis.call("pexpire", KEYS[1], ARGV[3])
end
return ""
"""
#: ARGV: message id, ttl in ms. A worker may have been quicker than the sender: then there is nothing to confirm.
_CONFIRM: Final = """
if redis.call("hget", KEYS[1], "id") ~= ARGV[1] then return end
if redis.call("hget", KEYS[1], "state") ~= "reserved" then return end
redis.call("hset", KEYS[1], "state", "waiting")
redis.call("pexpire", KEYS[1], ARGV[2])
"""
#: ARGV: message id, the run's token, ttl in ms, 0: the key is freed by the start. Returns "ours", or the other's state.
_START: Final = """
local holder = redis.call("hget", KEYS[1], "id")
if holder and holder ~= ARGV[1] then return redis.call("hget", KEYS[1], "state") end
redis.call("del", KEYS[1])
if ARGV[3] == "0" then return "ours" end
redis.call("hset", KEYS[1], "id", ARGV[1], "state", "running", "run", ARGV[2])
redis.call("pexpire", KEYS[1], ARGV[3])
return "ours"
"""
#: ARGV: the run's token, ttl in ms.
_RENEW: Final = """
if redis.call("hget", KEYS[1], "run") ~= ARGV[1] then return 0 end
return redis.call("pexpire", KEYS[1], ARGV[2])
"""
#: ARGV: message id, the run's token ("": it did not run), ttl in ms. The next run serves whoever asked for one more.
_HOLD_ON: Final = """
local holder = redis.call("hget", KEYS[1], "id")
if holder and (holder ~= ARGV[1] or (redis.call("hget", KEYS[1], "run") or ARGV[2]) ~= ARGV[2]) then return end
if not holder and ARGV[2] == "" then return end
redis.call("del", KEYS[1])
redis.call("hset", KEYS[1], "id", ARGV[1], "state", "waiting")
redis.call("pexpire", KEYS[1], ARGV[3])
"""
#: ARGV: message id, the run's token ("": it did not run). Returns whether one more run is wanted.
_RELEASE: Final = """
if redis.call("hget", KEYS[1], "id") ~= ARGV[1] then return 0 end
if (redis.call("hget", KEYS[1], "run") or "") ~= ARGV[2] then return 0 end
local again = redis.call("hget", KEYS[1], "again")
redis.call("del", KEYS[1])
return again and 1 or 0
"""

State = Literal["reserved", "waiting"]


class DeduplicationKeys:
    """Who holds which key. Every method may raise `RedisUnavailable`; all but `claim` may then be repeated.

    A key is held by a message, and while it runs by one delivery of it: a second delivery of the same
    message cannot free what the first one uses.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._prefix = f"{namespace}:dedup:{KEY_VERSION}:"
        self._claim: Any = client.register_script(_CLAIM)
        self._confirm: Any = client.register_script(_CONFIRM)
        self._start: Any = client.register_script(_START)
        self._renew: Any = client.register_script(_RENEW)
        self._hold_on: Any = client.register_script(_HOLD_ON)
        self._release: Any = client.register_script(_RELEASE)

    def claim(self, key: str, message_id: str, state: State, ttl: timedelta, *, again: bool) -> str:
        """Take the key unless another message holds it; returns that one's id, or an empty text.

        Parameters:
          again: Ask for one more run when the other is running.
        """
        return _text(self._call(self._claim, key, message_id, state, _ms(ttl), int(again)))

    def confirm(self, key: str, message_id: str, ttl: timedelta) -> None:
        """What was reserved is in the queue."""
        self._call(self._confirm, key, message_id, _ms(ttl))

    def start(self, key: str, message_id: str, run: str, ttl: timedelta | None) -> str:
        """Begin a run unless another message holds the key; returns ``ours``, or the other's state.

        Parameters:
          ttl: None frees the key, because it stands for waiting only.
        """
        return _text(self._call(self._start, key, message_id, run, 0 if ttl is None else _ms(ttl)))

    def renew(self, key: str, run: str, ttl: timedelta) -> bool:
        """Back to the full ttl; False when the run no longer holds it."""
        return bool(self._call(self._renew, key, run, _ms(ttl)))

    def hold_on(self, key: str, message_id: str, run: str, ttl: timedelta) -> None:
        """Keep the key for the message that goes back to the queue; not what another has taken."""
        self._call(self._hold_on, key, message_id, run, _ms(ttl))

    def release(self, key: str, message_id: str, run: str) -> bool:
        """Free what this delivery of the message holds; returns whether one more run is wanted."""
        return bool(self._call(self._release, key, message_id, run))

    def _call(self, script: Any, key: str, *args: str | int) -> Any:
        with reaching_redis():
            return script(keys=[self._prefix + key], args=args)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _ms(length: timedelta) -> int:
    return int(length.total_seconds() * 1000)
