"""Deduplication keys as an operator sees them: which message holds which, and how to release one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import redis

from housekeeping.core.errors import Refused
from housekeeping.core.redis.client import text, translate_redis_errors
from housekeeping.middleware.deduplication.keys import key_prefix

_PAGE: Final = 1000  # keys that Redis scans in one step, during which other clients wait
_FIELDS: Final = ["id", "state", "again"]

#: Free the key. Return what it contained; an empty table if it was free.
_RELEASE: Final = """
local held = redis.call("hmget", KEYS[1], "id", "state", "again")
local left = redis.call("pttl", KEYS[1])
if redis.call("del", KEYS[1]) == 0 then return {} end
return {held[1], held[2], held[3], left}
"""


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A deduplication key and the message that holds it.

    Attributes:
      state: ``waiting`` (queued, delayed, or for a retry), ``running``, or ``reserved`` (not in the queue yet).
      remaining: Time until the key expires, unless it is renewed.
      again: Whether a rerun is wanted after the current run.
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
        """Return the fields as JSON values; times in seconds."""
        return {
            "key": self.key,
            "actor": self.actor,
            "state": self.state,
            "message_id": self.message_id,
            "remaining_s": self.remaining.total_seconds(),
            "again": self.again,
        }


def held_keys(client: redis.Redis, namespace: str, most: int) -> tuple[list[HeldKey], bool]:
    """Return the held keys, sorted by name, and whether there are more than `most`.

    Redis is scanned in small steps, so that it keeps serving others however many keys it has.

    Raises:
      RedisUnavailable: When Redis does not answer.
    """
    prefix = key_prefix(namespace)
    found: dict[str, HeldKey] = {}
    with translate_redis_errors():
        for page in _pages(client, re.sub(r"([\[\]*?\\])", r"\\\1", prefix) + "*"):
            # A scan may return a key twice.
            found |= {each.key: each for each in _read(client, prefix, page)}
            if len(found) > most:
                break
    held = sorted(found.values(), key=lambda each: each.key)
    return held[:most], len(held) > most


def held_key(client: redis.Redis, namespace: str, key: str) -> HeldKey:
    """Return a held key.

    Raises:
      Refused: When no message holds it.
      RedisUnavailable: When Redis does not answer.
    """
    prefix = key_prefix(namespace)
    with translate_redis_errors():
        held = next(_read(client, prefix, [prefix + key]), None)
    if held is None:
        raise Refused(f"no message holds the key {key!r}; see: housekeeping dedup list")
    return held


def release_key(client: redis.Redis, namespace: str, key: str) -> HeldKey | None:
    """Release a key whatever message holds it; return what it held, or None if it was free already.

    A message that is alive continues. It can neither renew nor free the key once another message has taken it.

    Raises:
      RedisUnavailable: When Redis does not answer; the key may have been released nevertheless.
    """
    with translate_redis_errors():
        released: Any = client.register_script(_RELEASE)(keys=[key_prefix(namespace) + key])
    return _held(key, released[:3], released[3]) if released else None


def _pages(client: redis.Redis, pattern: str) -> Iterator[list[str]]:
    cursor: Any = 0
    while True:
        cursor, page = client.scan(cursor, match=pattern, count=_PAGE)
        if page:
            yield [text(name) for name in page]
        if int(cursor) == 0:
            return


def _read(client: redis.Redis, prefix: str, names: list[str]) -> Iterator[HeldKey]:
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
        return None  # its message ended meanwhile
    return HeldKey(key, message_id, state, timedelta(milliseconds=left), bool(again))
