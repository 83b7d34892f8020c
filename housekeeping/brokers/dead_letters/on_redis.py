"""Dead letters in Redis, which Dramatiq keeps in a sorted set by time and a hash of bodies per queue."""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

from dramatiq.brokers.redis import RedisBroker

from housekeeping.brokers.dead_letters.models import NEVER, DeadLetter, Requeued, run_hooks_before
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
    died_at: datetime
    body: bytes

    def read(self) -> DeadLetter:
        return DeadLetter.read(self.redis_id, self.queue, self.died_at, self.body)


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
        with translate_redis_errors():
            pages = [self._newest_first(queue, limit) for queue in self._queues()]
            newest_first = heapq.merge(*pages, key=lambda stored: stored.died_at, reverse=True)
            return [stored.read() for stored, _ in zip(newest_first, range(limit), strict=False)]

    def find(self, ids: Collection[str]) -> dict[str, DeadLetter]:
        found: dict[str, DeadLetter] = {}
        # Only bodies that contain one of the ids are decoded, because decoding thousands takes long.
        texts = [
            encoded for each in ids for encoded in (each.encode(errors="replace"), json.dumps(each)[1:-1].encode())
        ]
        with translate_redis_errors():
            for queue in self._queues():
                sought = set(ids)
                for stored in self._newest_first(queue):
                    if stored.redis_id not in sought and not any(encoded in stored.body for encoded in texts):
                        continue
                    letter = stored.read()
                    for name in {letter.id, letter.broker_id} & sought:
                        found[name] = max(letter, found.get(name, letter), key=lambda each: each.died_at or NEVER)
                        sought.discard(name)  # the next one of this queue is older
                    if not sought:
                        break
        return found

    def requeue(self, letter: DeadLetter) -> Requeued:
        # One requeue at a time: of two for the same dead letter, the second one's key would stay held.
        lock = self._client.lock(f"{self._broker.namespace}:__requeue__", timeout=_LOCK_S, blocking_timeout=_LOCK_S)
        with translate_redis_errors():
            if not lock.acquire():
                raise HousekeepingError("another process is requeueing dead letters; try again")
            try:
                return self._requeue(letter)
            finally:
                if lock.owned():
                    lock.release()

    def _requeue(self, letter: DeadLetter) -> Requeued:
        if self._client.zscore(self._key(letter.queue), letter.broker_id) is None:
            return Requeued(letter.id, "gone")
        redis_id = str(uuid4())
        message = letter.revived(self._broker).copy(options={"redis_message_id": redis_id})
        # Like the broker's `enqueue`, with another script.
        if outcome := run_hooks_before(self._broker, letter, message):
            return outcome
        dead, queue = self._key(letter.queue), f"{self._broker.namespace}:{message.queue_name}"
        arguments = [letter.broker_id, redis_id, message.encode()]
        if not retry_redis(lambda: self._move(keys=[dead, f"{dead}.msgs", queue, f"{queue}.msgs"], args=arguments)):
            return Requeued(letter.id, "gone")
        self._broker.emit_after("enqueue", message, None)
        return Requeued(letter.id, "requeued")

    def _queues(self) -> list[str]:
        """Return every queue with dead letters, also those of unknown actors."""
        keys = self._client.scan_iter(match=self._key("*"), count=1000, _type="zset")
        start = len(self._key("")) - len(_SUFFIX)
        return sorted({text(key)[start : -len(_SUFFIX)] for key in keys})

    def _newest_first(self, queue: str, limit: int | None = None) -> Iterator[_Stored]:
        """Yield the queue's dead letters, newest first, fetched page by page."""
        key, done = self._key(queue), 0
        while limit is None or done < limit:
            size = _PAGE if limit is None else min(_PAGE, limit - done)
            page = self._client.zrevrange(key, done, done + size - 1, withscores=True)
            if not page:
                return
            bodies = self._client.hmget(f"{key}.msgs", [redis_id for redis_id, _ in page])
            for (redis_id, died_at_ms), body in zip(page, bodies, strict=True):
                if body is not None:  # otherwise it was requeued or purged meanwhile
                    yield _Stored(text(redis_id), queue, datetime.fromtimestamp(died_at_ms / 1000, UTC), body)
            done += len(page)

    def _key(self, queue: str) -> str:
        return f"{self._broker.namespace}:{queue}{_SUFFIX}"
