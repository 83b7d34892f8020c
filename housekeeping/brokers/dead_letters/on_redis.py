"""Dead letters in Redis, which Dramatiq keeps in a sorted set by time and a hash of bodies per queue."""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any, Final
from uuid import uuid4

from dramatiq.brokers.redis import RedisBroker

from housekeeping.brokers.dead_letters.models import NEVER, DeadLetter, LetterResult, refuse_broken, run_hooks_before
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.redis.client import retry_redis, text, translate_redis_errors

_SUFFIX: Final = ".XQ"
_PAGE: Final = 100  # dead letters per round trip
_LOCK_S: Final = 30  # how long a requeue blocks others if its process dies

#: KEYS: the queue's dead letters by time, their bodies; the queue, its bodies. ARGV: the dead letter's id in Redis, the
#: message's new id, its body. Returns whether it was moved. Repeated after a lost answer it returns the same, unless a
#: worker has acknowledged the message by then.
_MOVE: Final = """
if redis.call("zrem", KEYS[1], ARGV[1]) == 0 then return redis.call("hexists", KEYS[4], ARGV[2]) end
redis.call("hdel", KEYS[2], ARGV[1])
redis.call("hset", KEYS[4], ARGV[2], ARGV[3])
redis.call("rpush", KEYS[3], ARGV[2])
return 1
"""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A dead letter as Redis contains it."""

    redis_id: str
    queue: str
    died_ms: float
    body: bytes

    def read(self) -> DeadLetter:
        try:
            died_at = datetime.fromtimestamp(self.died_ms / 1000, UTC)
        except (ValueError, OverflowError, OSError):
            died_at = None  # not a time: another program wrote it
        return DeadLetter.read(self.redis_id, self.queue, died_at, self.body)


class RedisDeadLetters:
    """The dead letters of a Redis broker, the ready-made one or an application's own.

    Every method raises `RedisUnavailable` when Redis does not answer.
    """

    def __init__(self, broker: RedisBroker) -> None:
        self._broker = broker
        self._client: Any = broker.client
        self._move: Any = broker.client.register_script(_MOVE)

    def counts(self) -> dict[str, int]:
        with translate_redis_errors():
            numbers = {queue: self._client.zcard(self._key(queue)) for queue in self._queues()}
        return {queue: number for queue, number in numbers.items() if number}

    def newest(self, limit: int) -> list[DeadLetter]:
        return list(islice(self.newest_first(), limit))

    def newest_first(self, queue: str | None = None, died_until: datetime | None = None) -> Iterator[DeadLetter]:
        with translate_redis_errors():
            queues = self._queues() if queue is None else [queue]
            stored = heapq.merge(
                *(self._newest_first(name, died_until) for name in queues), key=lambda each: each.died_ms, reverse=True
            )
            for each in stored:
                yield each.read()

    def find(self, ids: Collection[str]) -> dict[str, DeadLetter]:
        found: dict[str, DeadLetter] = {}
        with translate_redis_errors():
            queues = self._queues()
            for queue in queues:
                found |= self._by_redis_id(queue, ids)
            left = set(ids) - {*found}
            # Only bodies that contain one of the ids are decoded, because decoding thousands takes long.
            texts = [
                encoded for each in left for encoded in (each.encode(errors="replace"), json.dumps(each)[1:-1].encode())
            ]
            for queue in queues if left else ():
                sought = set(left)
                for stored in self._newest_first(queue):
                    if not any(encoded in stored.body for encoded in texts):
                        continue
                    letter = stored.read()
                    if letter.id in sought:
                        other = found.get(letter.id, letter)
                        found[letter.id] = max(letter, other, key=lambda each: each.died_at or NEVER)
                        sought.discard(letter.id)  # the next one of this queue is older
                    if not sought:
                        break
        return found

    def requeue(self, letter: DeadLetter) -> LetterResult:
        with self._exclusively():
            return self._requeue(letter)

    def requeue_each(self, letters: Sequence[DeadLetter]) -> Iterator[LetterResult]:
        for letter in letters:
            yield refuse_broken(letter, partial(self.requeue, letter))

    def delete_each(self, letters: Sequence[DeadLetter]) -> Iterator[LetterResult]:
        for letter in letters:
            dead = self._key(letter.queue)
            with self._exclusively(), self._client.pipeline() as pipeline:
                pipeline.zrem(dead, letter.broker_id).hdel(f"{dead}.msgs", letter.broker_id)
                deleted = any(pipeline.execute())
            yield LetterResult(letter.id, "deleted" if deleted else "gone")

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Lock the block. Two at once for the same dead letter would leave a deduplication key held."""
        lock = self._client.lock(f"{self._broker.namespace}:__requeue__", timeout=_LOCK_S, blocking_timeout=_LOCK_S)
        with translate_redis_errors():
            if not lock.acquire():
                raise HousekeepingError("another process is requeueing dead letters; try again")
            try:
                yield
            finally:
                if lock.owned():
                    lock.release()

    def _requeue(self, letter: DeadLetter) -> LetterResult:
        if self._client.zscore(self._key(letter.queue), letter.broker_id) is None:
            return LetterResult(letter.id, "gone")
        redis_id = str(uuid4())
        message = letter.revived(self._broker).copy(options={"redis_message_id": redis_id})
        # Like the broker's `enqueue`, with another script.
        if outcome := run_hooks_before(self._broker, letter, message):
            return outcome
        dead, queue = self._key(letter.queue), f"{self._broker.namespace}:{message.queue_name}"
        arguments = [letter.broker_id, redis_id, message.encode()]
        if not retry_redis(lambda: self._move(keys=[dead, f"{dead}.msgs", queue, f"{queue}.msgs"], args=arguments)):
            return LetterResult(letter.id, "gone")
        self._broker.emit_after("enqueue", message, None)
        return LetterResult(letter.id, "requeued")

    def _queues(self) -> list[str]:
        """Return every queue with dead letters, also those of unknown actors."""
        keys = self._client.scan_iter(match=self._key("*"), count=1000, _type="zset")
        start = len(self._key("")) - len(_SUFFIX)
        return sorted({text(key)[start : -len(_SUFFIX)] for key in keys})

    def _newest_first(self, queue: str, died_until: datetime | None = None) -> Iterator[_Stored]:
        """Yield the queue's dead letters, newest first, fetched page by page."""
        key = self._key(queue)
        until: Any = "+inf" if died_until is None else round(died_until.timestamp() * 1000)
        same: set[Any] = set()  # the ids that were yielded with the time `until`
        # By time and not by rank, because letters come and go meanwhile.
        while page := self._client.zrevrangebyscore(key, until, "-inf", 0, _PAGE + len(same), withscores=True):
            page = [(redis_id, ms) for redis_id, ms in page if redis_id not in same]
            if not page:
                return
            yield from self._stored(queue, page)
            last = page[-1][1]
            same = (same if last == until else set()) | {redis_id for redis_id, ms in page if ms == last}
            until = last

    def _stored(self, queue: str, found: Sequence[tuple[Any, float]]) -> Iterator[_Stored]:
        bodies = self._client.hmget(f"{self._key(queue)}.msgs", [redis_id for redis_id, _ in found])
        for (redis_id, died_ms), body in zip(found, bodies, strict=True):
            if body is not None:  # otherwise it was requeued or purged meanwhile
                yield _Stored(text(redis_id), queue, died_ms, body)

    def _by_redis_id(self, queue: str, ids: Collection[str]) -> dict[str, DeadLetter]:
        """Return the queue's dead letters with these broker ids, without reading the others."""
        given = [each.encode(errors="replace") for each in ids]
        pipeline = self._client.pipeline(transaction=False)
        for redis_id in given:
            pipeline.zscore(self._key(queue), redis_id)
        times = pipeline.execute()
        known = [(redis_id, ms) for redis_id, ms in zip(given, times, strict=True) if ms is not None]
        return {stored.redis_id: stored.read() for stored in self._stored(queue, known)} if known else {}

    def _key(self, queue: str) -> str:
        return f"{self._broker.namespace}:{queue}{_SUFFIX}"
