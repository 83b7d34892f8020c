"""The keys and commands of Redis that the library and its broker use, in memory, with a clock that is given.

Answers are as Redis gives them to a script: bytes, numbers, lists, None. Held to the real one by
test_redis_store.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, Final

from redis.exceptions import ResponseError

_WRONG_TYPE: Final = "WRONGTYPE Operation against a key holding the wrong kind of value"

Reply = Any


class RedisStore:
    """One database of a Redis server.

    Parameters:
      clock: Seconds since the epoch, by the server's clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: dict[bytes, Any] = {}
        self._expires_ms: dict[bytes, int] = {}
        self._commands: dict[Any, Callable[..., Reply]] = {}
        self.scripts_api: Any = None  # what scripts call this store by; made by the first one

    def call(self, *args: Any) -> Reply:
        """Do one command.

        Raises:
          ResponseError: As Redis would refuse it.
        """
        name = args[0]
        command = self._commands.get(name)
        if command is None:
            word = name.decode() if isinstance(name, bytes) else name
            command = getattr(self, f"do_{word.lower()}", None)
            if command is None:
                raise ResponseError(f"unknown command {word!r}")
            self._commands[name] = command
        return command(*[arg if type(arg) is bytes else as_bytes(arg) for arg in args[1:]])

    def clear(self) -> None:
        """Lose everything."""
        self._values.clear()
        self._expires_ms.clear()

    def live_keys(self) -> Iterator[bytes]:
        """Every key that has not expired."""
        return (key for key in list(self._values) if self._live(key))

    def value(self, key: bytes) -> Any:
        """What a key holds, for whoever looks on; None when there is none."""
        return self._values[key] if self._live(key) else None

    def expires_at(self, key: bytes) -> float | None:
        """When a key expires, by the server's clock; None: never."""
        at = self._expires_ms.get(key)
        return None if at is None else at / 1000

    def _ms(self) -> int:
        return int(self._clock() * 1000)

    def _live(self, key: bytes) -> bool:
        expires = self._expires_ms.get(key)
        if expires is None:
            return key in self._values
        if expires <= self._ms():
            self._values.pop(key, None)
            del self._expires_ms[key]
            return False
        return True

    def _typed(self, key: bytes, kind: type) -> Any:
        if not self._live(key):
            return None
        value = self._values[key]
        if not isinstance(value, kind):
            raise ResponseError(_WRONG_TYPE)
        return value

    def _made(self, key: bytes, kind: type) -> Any:
        value = self._typed(key, kind)
        if value is None:
            value = self._values[key] = kind()
        return value

    def _tidy(self, key: bytes) -> None:
        if not self._values[key]:
            self._drop(key)

    def _drop(self, key: bytes) -> int:
        if not self._live(key):
            return 0
        del self._values[key]
        self._expires_ms.pop(key, None)
        return 1

    def do_time(self) -> Reply:
        now = self._ms()
        return [b"%d" % (now // 1000), b"%d" % (now % 1000 * 1000)]

    def do_ping(self) -> Reply:
        return True

    def do_get(self, key: bytes) -> Reply:
        return self._typed(key, bytes)

    def do_set(self, key: bytes, value: bytes, *options: bytes) -> Reply:
        asked = [option.lower() for option in options]
        before = self._typed(key, bytes) if b"get" in asked else None
        there = self._live(key)
        refused = (b"nx" in asked and there) or (b"xx" in asked and not there)
        if not refused:
            kept = self._expires_ms.get(key) if b"keepttl" in asked else None
            self._values[key] = value
            self._expires_ms.pop(key, None)
            if kept is not None:
                self._expires_ms[key] = kept
            for unit, factor in ((b"px", 1), (b"ex", 1000)):
                if unit in asked:
                    self._expires_ms[key] = self._ms() + int(options[asked.index(unit) + 1]) * factor
        if b"get" in asked:
            return before
        return None if refused else True

    def do_del(self, *keys: bytes) -> Reply:
        return sum(self._drop(key) for key in keys)

    do_unlink = do_del

    def do_exists(self, *keys: bytes) -> Reply:
        return sum(self._live(key) for key in keys)

    def do_keys(self, pattern: bytes) -> Reply:
        return [key for key in self.live_keys() if fnmatchcase(key.decode(), pattern.decode())]

    def do_incr(self, key: bytes) -> Reply:
        number = int(self._typed(key, bytes) or 0) + 1
        self._values[key] = b"%d" % number
        return number

    def do_pexpire(self, key: bytes, ms: bytes) -> Reply:
        if not self._live(key):
            return 0
        self._expires_ms[key] = self._ms() + int(ms)
        return int(self._live(key) or 1)

    def do_expire(self, key: bytes, seconds: bytes) -> Reply:
        return self.do_pexpire(key, b"%d" % (int(seconds) * 1000))

    def do_persist(self, key: bytes) -> Reply:
        return int(self._live(key) and self._expires_ms.pop(key, None) is not None)

    def do_pttl(self, key: bytes) -> Reply:
        if not self._live(key):
            return -2
        at = self._expires_ms.get(key)
        return -1 if at is None else at - self._ms()

    def do_ttl(self, key: bytes) -> Reply:
        left = self.do_pttl(key)
        return left if left < 0 else (left + 500) // 1000

    def do_hget(self, key: bytes, name: bytes) -> Reply:
        return (self._typed(key, dict) or {}).get(name)

    def do_hmget(self, key: bytes, *names: bytes) -> Reply:
        there = self._typed(key, dict) or {}
        return [there.get(name) for name in names]

    def do_hgetall(self, key: bytes) -> Reply:
        return [part for pair in (self._typed(key, dict) or {}).items() for part in pair]

    def do_hset(self, key: bytes, *pairs: bytes) -> Reply:
        there = self._made(key, dict)
        before = len(there)
        there.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(there) - before

    def do_hsetnx(self, key: bytes, name: bytes, value: bytes) -> Reply:
        return 0 if name in (self._typed(key, dict) or {}) else self.do_hset(key, name, value)

    def do_hdel(self, key: bytes, *names: bytes) -> Reply:
        there = self._typed(key, dict)
        if there is None:
            return 0
        gone = sum(there.pop(name, None) is not None for name in names)
        self._tidy(key)
        return gone

    def do_hexists(self, key: bytes, name: bytes) -> Reply:
        return int(name in (self._typed(key, dict) or {}))

    def do_hlen(self, key: bytes) -> Reply:
        return len(self._typed(key, dict) or {})

    def do_hkeys(self, key: bytes) -> Reply:
        return list(self._typed(key, dict) or {})

    def do_hvals(self, key: bytes) -> Reply:
        return list((self._typed(key, dict) or {}).values())

    def do_rpush(self, key: bytes, *values: bytes) -> Reply:
        there = self._made(key, deque)
        there.extend(values)
        return len(there)

    def do_lpush(self, key: bytes, *values: bytes) -> Reply:
        there = self._made(key, deque)
        there.extendleft(values)
        return len(there)

    def do_lpop(self, key: bytes) -> Reply:
        there = self._typed(key, deque)
        if there is None:
            return None
        first = there.popleft()
        self._tidy(key)
        return first

    def do_llen(self, key: bytes) -> Reply:
        return len(self._typed(key, deque) or ())

    def do_lrange(self, key: bytes, first: bytes, last: bytes) -> Reply:
        return _between(list(self._typed(key, deque) or ()), first, last)

    def do_lrem(self, key: bytes, count: bytes, value: bytes) -> Reply:
        there = self._typed(key, deque)
        if there is None or int(count) < 0:
            return 0
        gone = min(there.count(value), int(count) or len(there))
        for _ in range(gone):
            there.remove(value)
        self._tidy(key)
        return gone

    def do_sadd(self, key: bytes, *members: bytes) -> Reply:
        there = self._made(key, Members)
        before = len(there)
        there.update(dict.fromkeys(members))
        return len(there) - before

    def do_srem(self, key: bytes, *members: bytes) -> Reply:
        there = self._typed(key, Members)
        if there is None:
            return 0
        before = len(there)
        for member in members:
            there.pop(member, None)
        gone = before - len(there)
        self._tidy(key)
        return gone

    def do_smembers(self, key: bytes) -> Reply:
        return list(self._typed(key, Members) or ())

    def do_sismember(self, key: bytes, member: bytes) -> Reply:
        return int(member in (self._typed(key, Members) or ()))

    def do_scard(self, key: bytes) -> Reply:
        return len(self._typed(key, Members) or ())

    def do_zadd(self, key: bytes, *pairs: bytes) -> Reply:
        there = self._made(key, Scores)
        only_new = pairs[0].lower() == b"nx"
        pairs = pairs[only_new:]
        before = len(there)
        for score, member in zip(pairs[::2], pairs[1::2], strict=True):
            if not (only_new and member in there):
                there[member] = float(score)
        return len(there) - before

    def do_zrem(self, key: bytes, *members: bytes) -> Reply:
        there = self._typed(key, Scores)
        if there is None:
            return 0
        gone = sum(there.pop(member, None) is not None for member in members)
        self._tidy(key)
        return gone

    def do_zscore(self, key: bytes, member: bytes) -> Reply:
        score = (self._typed(key, Scores) or {}).get(member)
        return None if score is None else b"%.17g" % score

    def do_zcard(self, key: bytes) -> Reply:
        return len(self._typed(key, Scores) or ())

    def do_zcount(self, key: bytes, least: bytes, most: bytes) -> Reply:
        return len(self._within(key, least, most))

    def do_zrange(self, key: bytes, first: bytes, last: bytes) -> Reply:
        return _between(self._ranked(key), first, last)

    def do_zrangebyscore(self, key: bytes, least: bytes, most: bytes, *limit: bytes) -> Reply:
        return _limited(self._within(key, least, most), limit)

    def do_zrevrangebyscore(self, key: bytes, most: bytes, least: bytes, *limit: bytes) -> Reply:
        return _limited(self._within(key, least, most)[::-1], limit)

    def do_zremrangebyrank(self, key: bytes, first: bytes, last: bytes) -> Reply:
        gone = _between(self._ranked(key), first, last)
        return self.do_zrem(key, *gone) if gone else 0

    def do_zremrangebyscore(self, key: bytes, least: bytes, most: bytes) -> Reply:
        gone = self._within(key, least, most)
        return self.do_zrem(key, *gone) if gone else 0

    def _ranked(self, key: bytes) -> list[bytes]:
        there = self._typed(key, Scores) or {}
        if len(there) < 2:
            return list(there)
        return sorted(there, key=lambda member: (there[member], member))

    def _within(self, key: bytes, least: bytes, most: bytes) -> list[bytes]:
        there = self._typed(key, Scores)
        if there is None:
            return []
        (low, above), (high, below) = _bound(least), _bound(most)
        return [
            member
            for member in self._ranked(key)
            if (there[member] > low if above else there[member] >= low)
            and (there[member] < high if below else there[member] <= high)
        ]


class Members(dict[bytes, None]):
    """A set of Redis, in the order it was made, so that a seed decides everything."""


class Scores(dict[bytes, float]):
    """A sorted set of Redis."""


def as_bytes(value: Any) -> bytes:
    """An argument as it goes over the wire; a number as Lua writes it."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, float) and not value.is_integer():
        return b"%.17g" % value
    return b"%d" % int(value)


def _bound(text: bytes) -> tuple[float, bool]:
    return (float(text[1:]), True) if text.startswith(b"(") else (float(text), False)


def _between(values: list[bytes], first: bytes, last: bytes) -> list[bytes]:
    start, end = int(first), int(last)
    start = max(start + len(values), 0) if start < 0 else start
    end = end + len(values) if end < 0 else end
    return values[start : end + 1] if end >= start else []


def _limited(values: list[bytes], limit: tuple[bytes, ...]) -> list[bytes]:
    if not limit:
        return values
    assert limit[0].lower() == b"limit"
    offset, count = int(limit[1]), int(limit[2])
    return values[offset:] if count < 0 else values[offset : offset + count]
