"""In-memory Redis with the commands that the library and its broker use, on a given clock."""

from __future__ import annotations

from collections import deque

from tests.simulator.redis_keyspace import Keyspace, Reply


class Members(dict[bytes, None]):
    """Redis set in insertion order, so that the seed decides everything."""


class Scores(dict[bytes, float]):
    """Redis sorted set."""


class RedisStore(Keyspace):
    """One Redis database.

    Parameters:
      clock: Seconds since the epoch, by the server's clock.
    """

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

    def do_rpush(self, key: bytes, *values: bytes) -> Reply:
        there = self._made(key, deque)
        there.extend(values)
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
        found = [
            (score, member)
            for member, score in there.items()
            if (score > low if above else score >= low) and (score < high if below else score <= high)
        ]
        return [member for _, member in sorted(found)]


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
