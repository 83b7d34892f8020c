"""Dramatiq's Redis broker, made reliable, and its dead letters.

Message bodies are validated, because Dramatiq's consumers stop at one that they cannot read. Dramatiq keeps the dead
letters of each queue in a sorted set by time and a hash of bodies.
"""

from __future__ import annotations

import functools
import heapq
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final
from uuid import uuid4

import redis
from dramatiq import Broker, Consumer, Message, MessageProxy
from dramatiq.brokers.redis import DEFAULT_MAINTENANCE_CHANCE, MAINTENANCE_SCALE, RedisBroker
from dramatiq.common import compute_backoff, q_name
from dramatiq.errors import ConnectionClosed

from housekeeping.brokers.dead_letters import DeadLetter, LetterAction, LetterResult, requeue
from housekeeping.brokers.dramatiq_internals import (
    RedisConsumer,
    body_of_dead_letter,
    change_class,
    dispatch_arguments,
    dispatch_script,
    exception_of,
    forked_with,
    read_message,
)
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.logs import error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.redis import (
    fill,
    is_storable,
    read_scripts,
    redis_client,
    register_freeing_script,
    retry_on_outage,
    text,
    translate_redis_errors,
)
from housekeeping.core.redis_internals import reject_cluster
from housekeeping.core.settings import Settings

logger = named_logger(__name__)

#: Time without a heartbeat after which a worker counts as killed and its messages run again. It is Dramatiq's default,
#: set explicitly because promise B1 (A killed worker loses no message) states this time.
HEARTBEAT_TIMEOUT_MS: Final = 60_000
DEAD_MESSAGE_TTL_MS: Final = 7 * 24 * 3600 * 1000  # Dramatiq's default: dead letters are kept for a week


#: Attribute of a `MessageProxy`: a middleware's function that ends the message and acknowledges it in one script. It is
#: given the Redis keys and arguments of Dramatiq's script for ``ack``; None ends the message only.
WITH_ACKNOWLEDGMENT: Final = "with_acknowledgment"
#: The scripts of the file beside this module, by name.
_LUA: Final = read_scripts(__file__)


def dispatch_source(broker: RedisBroker) -> str:
    """Return Dramatiq's script for all commands, with the time of Redis; raises as `dispatch_script`."""
    return f"{_LUA['clock']}{text(dispatch_script(broker).script)}"


class ReliableRedisBroker(RedisBroker):
    """Dramatiq's Redis broker, which loses no message to a lost connection or an unreadable message.

    After a lost connection, Dramatiq's class forgets delayed messages in its memory, including retries, and messages
    whose delivery was lost. They stay assigned to the process until it ends. This class requeues them when the
    connection is restored. It also does so once a minute, because Redis may execute a command after its sender has
    timed out.

    An unreadable message is logged and becomes a dead letter, unchanged, with the id it has in Redis. Dramatiq's
    consumer stops at such a message and loses those that it fetched together with it.
    """

    rewrites_dead_letters: Final = True  # as `DeadLetters` would otherwise do

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self._prepare()

    def _prepare(self) -> None:
        #: By queue: the ids in Redis of the messages in this process's memory and threads.
        self.in_hand: defaultdict[str, set[str]] = defaultdict(set)
        forked_with.add(self)

    def after_fork(self) -> None:
        """Consume with an id of its own in a forked child, which would else requeue the messages of its parent."""
        self.broker_id = str(uuid4())
        self.in_hand = defaultdict(set)

    @staticmethod
    def adopt(broker: Broker) -> None:
        """Turn a Redis broker of Dramatiq's own class into a `ReliableRedisBroker` with the same parameters.

        A subclass only does maintenance with each command. Any other broker stays as it is.

        Raises:
          SettingsError: If the broker's client is of Redis Cluster.
        """
        if isinstance(broker, RedisBroker):
            reject_cluster(broker.client)
        if isinstance(broker, RedisBroker) and broker.maintenance_chance == DEFAULT_MAINTENANCE_CHANCE:
            broker.maintenance_chance = MAINTENANCE_SCALE
        if type(broker) is RedisBroker:
            change_class(broker, ReliableRedisBroker)
            broker._prepare()

    @property
    def consumer_class(self) -> type[RedisConsumer]:
        return _Consumer

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> Consumer:
        """Return a new consumer for a queue; called by Dramatiq at the start and after each lost connection."""
        if queue_name != q_name(queue_name):
            self.in_hand.pop(queue_name, None)  # delayed messages were in the memory of the previous consumer
        with _connected():
            self.requeue_lost_deliveries(queue_name)
        return super().consume(queue_name, prefetch, timeout)

    def requeue_lost_deliveries(self, queue_name: str) -> None:
        """Requeue messages that Redis has assigned to this process but that never arrived.

        Only the thread that fetches from this queue may call it, and only after it has passed on all fetched messages.
        """
        # Read before `in_hand`: Redis does not requeue what is acknowledged in between.
        assigned: Any = self.client.smembers(self._assigned(queue_name))
        lost = {redis_id.decode() for redis_id in assigned} - self.in_hand[queue_name]
        bodies: Any = self.client.hmget(f"{self.namespace}:{queue_name}.msgs", list(lost)) if lost else []
        for redis_id, body in list(zip(lost, bodies, strict=True)):
            message, _ = _read(body, queue_name)
            if message is not None and message.options["redis_message_id"] != redis_id:
                self.bury(queue_name, body, "its redis_message_id is not its own")  # so it was not acknowledged
                lost.discard(redis_id)
        if lost:
            logger.warning("Lost deliveries requeued", queue=queue_name, messages=len(lost))
            self.do_requeue(queue_name, *lost)

    def bury(self, queue_name: str, body: bytes, why: str) -> None:
        """Move an unreadable message that was fetched from a queue to the dead letters, unchanged."""
        try:
            ids: Any = list(self.client.smembers(self._assigned(queue_name)))
            bodies: Any = self.client.hmget(f"{self.namespace}:{queue_name}.msgs", ids) if ids else []
            for redis_id in [each for each, found in zip(ids, bodies, strict=True) if found == body]:
                self.do_nack(queue_name, redis_id)
                logger.error(
                    "Unreadable message moved to the dead letters",
                    queue=queue_name,
                    redis_message_id=redis_id.decode(),
                    error=why,
                )
        except redis.RedisError as error:
            # It stays assigned to this process, and is checked again with the next consumer.
            logger.error("Unreadable messages could not be moved", queue=queue_name, error=error_line(error))

    def nack_rewritten(self, queue_name: str, message: MessageProxy) -> None:
        """Move a message to the dead letters as it is now, with its error, in one round trip."""
        redis_id, body = message.options["redis_message_id"], body_of_dead_letter(message)
        if body is None:
            self.do_nack(queue_name, redis_id)
        else:
            self._nack(keys=[self.namespace], args=dispatch_arguments(self, "nack", queue_name, redis_id, body))

    def _dispatch(self, command: str) -> Callable[..., Any]:
        script = self._add if command == "enqueue" else self._process
        return lambda queue_name, *args: script(
            keys=[self.namespace], args=dispatch_arguments(self, command, queue_name, *args)
        )

    @functools.cached_property
    def _add(self) -> Callable[..., Any]:
        return self.client.register_script(dispatch_source(self))

    @functools.cached_property
    def _process(self) -> Callable[..., Any]:
        return register_freeing_script(self.client, dispatch_source(self))

    @functools.cached_property
    def _nack(self) -> Callable[..., Any]:
        return register_freeing_script(self.client, fill(_LUA["nack"], dispatch=dispatch_source(self)))

    def _assigned(self, queue_name: str) -> str:
        return f"{self.namespace}:__acks__.{self.broker_id}.{queue_name}"


class _Consumer(RedisConsumer):
    """Dramatiq's consumer, which tracks its deliveries and treats a slow Redis like a lost connection."""

    broker: ReliableRedisBroker

    def __init__(self, broker: ReliableRedisBroker, queue_name: str, prefetch: int, timeout: int) -> None:
        super().__init__(broker, queue_name, prefetch, timeout)
        self._thread_freed = threading.Event()
        self._next_check = _time_of_next_check()

    def __next__(self) -> MessageProxy | None:
        """Return the next message; None if there is none now."""
        with _connected():
            if not self.message_cache:
                if time.monotonic() >= self._next_check:
                    self.broker.requeue_lost_deliveries(self.queue_name)
                    self._next_check = _time_of_next_check()
                free = self.prefetch - self.outstanding_message_count
                if free <= 0:
                    self._wait_for_a_thread()
                    return None
                self.message_cache = self.broker.do_fetch(self.queue_name, free)
            while self.message_cache:
                body = self.message_cache.pop(0)
                message, why = _read(body, self.queue_name)
                if message is not None:
                    self.misses = 0
                    self.queued_message_ids.add(message.message_id)
                    self.broker.in_hand[self.queue_name].add(message.options["redis_message_id"])
                    delivered = MessageProxy(message)
                    # A proxy looks up each attribute in Python, and the hooks read some fifty of them.
                    vars(delivered).update(vars(message))
                    return delivered
                if body is not None:  # it was deleted, but not its id
                    self.broker.bury(self.queue_name, body, why)
        self.misses, pause_ms = compute_backoff(self.misses, max_backoff=self.timeout)
        time.sleep(pause_ms / 1000)
        return None

    def ack(self, message: MessageProxy) -> None:
        """Acknowledge a message, in one script with what a middleware has left to do at its end."""
        end = vars(message).get(WITH_ACKNOWLEDGMENT)
        with _connected():
            if end is None:
                super().ack(message)
            else:
                arguments = dispatch_arguments(self.broker, "ack", self.queue_name, message.options["redis_message_id"])
                end(([self.broker.namespace], [str(each) for each in arguments]))
                self.queued_message_ids.discard(message.message_id)
        self._forget(message)

    def nack(self, message: MessageProxy) -> None:
        end = vars(message).get(WITH_ACKNOWLEDGMENT)
        with _connected():
            if end is not None:
                end(None)  # a hook has failed the message after its end was left to the acknowledgment
            if exception_of(message) is None:
                super().nack(message)
            else:
                self.broker.nack_rewritten(self.queue_name, message)
                self.queued_message_ids.discard(message.message_id)
        self._forget(message)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        given = list(messages)
        with _connected():
            super().requeue(given)
        for message in given:
            self._forget(message)

    def _wait_for_a_thread(self) -> None:
        """Wait until a thread finishes its message, at most for the timeout.

        Dramatiq's consumer sleeps longer each time and sends no heartbeats meanwhile. A process with long runs would
        then count as killed, and other processes would run its messages.
        """
        self._thread_freed.clear()
        if self.outstanding_message_count >= self.prefetch and not self._thread_freed.wait(self.timeout / 1000):
            # Any command is a heartbeat. A thread that was freed has just sent one, the acknowledgement.
            self.broker.do_qsize(self.queue_name)

    def _forget(self, message: MessageProxy) -> None:
        self._thread_freed.set()
        self.broker.in_hand[self.queue_name].discard(message.options["redis_message_id"])


def _time_of_next_check() -> float:
    """Return when to check for lost deliveries again: after the heartbeat timeout."""
    return time.monotonic() + HEARTBEAT_TIMEOUT_MS / 1000


@contextmanager
def _connected() -> Iterator[None]:
    """Turn errors of Redis into ConnectionClosed, which Dramatiq retries; any other error ends its thread."""
    try:
        yield
    except redis.RedisError as error:
        raise ConnectionClosed(error) from None


def redis_broker(settings: Settings) -> RedisBroker:
    """Return the Redis broker that the settings name, without middleware.

    Raises:
      SettingsError: When no URL is set, or redis-py cannot read it.
    """
    return ReliableRedisBroker(
        client=redis_client(settings.broker_url or settings.require_redis_url()),
        namespace=f"{settings.namespace}:broker",
        middleware=[],
        # Each command looks for messages of dead workers. By default 1 in 1000 does, which takes about 10 minutes.
        maintenance_chance=MAINTENANCE_SCALE,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_MS,
        dead_message_ttl=DEAD_MESSAGE_TTL_MS,
    )


def _read(body: bytes | None, queue_name: str) -> tuple[Message[Any] | None, str]:
    """Return a fetched message, or None and why Dramatiq could not process it."""
    if body is None:
        return None, "it is missing"
    message, why = read_message(body, queue_name)
    redis_id = None if message is None else message.options.get("redis_message_id")
    if message is not None and not (isinstance(redis_id, str) and is_storable(redis_id)):
        return None, "it has no valid redis_message_id in its options"
    return message, why


_SUFFIX: Final = ".XQ"
_PAGE: Final = 100  # dead letters per round trip
_LOCK_S: Final = 30  # how long a requeue blocks others if its process dies

_MOVE: Final = _LUA["move"]


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

    def newest_first(self, queue: str | None = None, died_until: datetime | None = None) -> Iterator[DeadLetter]:
        with translate_redis_errors():
            queues = self._queues() if queue is None else [queue]
            letters = (self._newest_first(name, died_until) for name in queues)
            yield from heapq.merge(*letters, key=lambda each: each.died_ms, reverse=True)

    def change_each(self, action: LetterAction, letters: Sequence[DeadLetter]) -> Iterator[LetterResult]:
        change = self._requeue if action == "requeue" else self._delete
        for letter in letters:
            with self._exclusively():
                result = change(letter)
            yield result

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
        dead, redis_id = self._key(letter.queue), str(uuid4())
        if self._client.zscore(dead, letter.broker_id) is None:
            return LetterResult(letter.id, "gone")

        def move(message: Message[Any]) -> object:
            queue = f"{self._broker.namespace}:{message.queue_name}"
            arguments = [letter.broker_id, redis_id, message.encode()]
            return retry_on_outage(
                lambda: self._move(keys=[dead, f"{dead}.msgs", queue, f"{queue}.msgs"], args=arguments)
            )

        return requeue(self._broker, letter, move, redis_message_id=redis_id)

    def _delete(self, letter: DeadLetter) -> LetterResult:
        dead = self._key(letter.queue)
        with self._client.pipeline() as pipeline:
            pipeline.zrem(dead, letter.broker_id).hdel(f"{dead}.msgs", letter.broker_id)
            return LetterResult(letter.id, "deleted" if any(pipeline.execute()) else "gone")

    def _queues(self) -> list[str]:
        """Return every queue with dead letters, also those of unknown actors."""
        keys = self._client.scan_iter(match=self._key("*"), count=1000, _type="zset")
        start = len(self._key("")) - len(_SUFFIX)
        return sorted({text(key)[start : -len(_SUFFIX)] for key in keys})

    def _newest_first(self, queue: str, died_until: datetime | None = None) -> Iterator[DeadLetter]:
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

    def _stored(self, queue: str, found: Sequence[tuple[Any, float]]) -> Iterator[DeadLetter]:
        bodies = self._client.hmget(f"{self._key(queue)}.msgs", [redis_id for redis_id, _ in found])
        for (redis_id, died_ms), body in zip(found, bodies, strict=True):
            if body is not None:  # otherwise it was requeued or purged meanwhile
                yield DeadLetter(text(redis_id), queue, died_ms, body)

    def _key(self, queue: str) -> str:
        return f"{self._broker.namespace}:{queue}{_SUFFIX}"
