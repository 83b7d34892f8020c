"""The keys of deduplication as an operator sees them: who holds which, and how to take one from its message."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import redis

from housekeeping.core.errors import Refused
from housekeeping.core.redis_client import translate_redis_errors
from housekeeping.middleware.deduplication.keys import key_prefix, text

_PAGE: Final = 1000  # keys that Redis looks at in one step, while it serves nobody else
_FIELDS: Final = ["id", "state", "again"]

#: Says what the key was, and frees it; nothing when there is none.
_TAKE_AWAY: Final = """
local was = redis.call("hmget", KEYS[1], "id", "state", "again")
local left = redis.call("pttl", KEYS[1])
if redis.call("del", KEYS[1]) == 0 then return {} end
return {was[1], was[2], was[3], left}
"""


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A key and the message that holds it.

    Attributes:
      state: ``waiting`` (queued, delayed, or for a retry), ``running``, or ``reserved`` (not in the queue yet).
      remaining: Until it is free by itself, unless its message gives another sign of life.
      again: Whether one more run is wanted after the one that runs.
    """

    key: str
    message_id: str
    state: str
    remaining: timedelta
    again: bool

    @property
    def actor(self) -> str:
        """The name of the message's actor."""
        return self.key.rpartition(":")[0]

    def as_json(self) -> dict[str, Any]:
        """As plain values by name; times in seconds."""
        return {
            "key": self.key,
            "actor": self.actor,
            "state": self.state,
            "message_id": self.message_id,
            "remaining_s": self.remaining.total_seconds(),
            "again": self.again,
        }


def held_keys(client: redis.Redis, namespace: str, most: int) -> tuple[list[HeldKey], bool]:
    """The keys that are held now, by name, and whether there are more than `most`.

    Redis is asked in small steps, so that it goes on serving others however many keys of whatever kind it has.

    Raises:
      RedisUnavailable: When Redis does not answer.
    """
    prefix = key_prefix(namespace)
    found: dict[str, HeldKey] = {}
    with translate_redis_errors():
        for page in _pages(client, re.sub(r"([\[\]*?\\])", r"\\\1", prefix) + "*"):
            # Redis may show a key twice.
            found |= {each.key: each for each in _looked_up(client, prefix, page)}
            if len(found) > most:
                break
    held = sorted(found.values(), key=lambda each: each.key)
    return held[:most], len(held) > most


def held_key(client: redis.Redis, namespace: str, key: str) -> HeldKey:
    """Who holds a key.

    Raises:
      Refused: When nobody does.
      RedisUnavailable: When Redis does not answer.
    """
    prefix = key_prefix(namespace)
    with translate_redis_errors():
        held = next(_looked_up(client, prefix, [prefix + key]), None)
    if held is None:
        raise Refused(f"nobody holds the key {key!r}; housekeeping dedup list shows those that are held")
    return held


def release_key(client: redis.Redis, namespace: str, key: str) -> HeldKey | None:
    """Free a key whoever holds it; returns who did, None when it was free already.

    Harmless to a message that lives: it goes on, and can neither renew nor free what another takes meanwhile.

    Raises:
      RedisUnavailable: When Redis does not answer; the key may be free all the same.
    """
    with translate_redis_errors():
        was: Any = client.register_script(_TAKE_AWAY)(keys=[key_prefix(namespace) + key])
    return _held(key, was[:3], was[3]) if was else None


def _pages(client: redis.Redis, pattern: str) -> Iterator[list[str]]:
    cursor: Any = 0
    while True:
        cursor, page = client.scan(cursor, match=pattern, count=_PAGE)
        if page:
            yield [text(name) for name in page]
        if int(cursor) == 0:
            return


def _looked_up(client: redis.Redis, prefix: str, names: list[str]) -> Iterator[HeldKey]:
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hmget(name, _FIELDS)
            pipeline.pttl(name)
        answers = pipeline.execute()
    for name, fields, left in zip(names, answers[::2], answers[1::2], strict=True):
        held = _held(name.removeprefix(prefix), fields, left)
        if held is not None:
            yield held


def _held(key: str, fields: list[Any], left: int) -> HeldKey | None:
    message_id, state, again = (text(field) for field in fields)
    if not message_id or left < 0:
        return None  # it ended meanwhile
    return HeldKey(key, message_id, state, timedelta(milliseconds=left), bool(again))
