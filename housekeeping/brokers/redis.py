"""Dramatiq's Redis broker, with nothing left to chance."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import redis
from dramatiq import Broker, Consumer, MessageProxy
from dramatiq.brokers.redis import DEFAULT_MAINTENANCE_CHANCE, MAINTENANCE_SCALE, RedisBroker
from dramatiq.common import q_name
from dramatiq.errors import ConnectionClosed

from housekeeping.brokers.validation import read
from housekeeping.core.redis_client import redis_client
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.middleware.dramatiq_internals import RedisConsumer, change_class, fetch

logger = named_logger(__name__)

HEARTBEAT_TIMEOUT_MS: Final = 60_000  # promise B1: a killed worker's messages run again after this
DEAD_MESSAGE_TTL_MS: Final = 7 * 24 * 3600 * 1000  # Dramatiq's own, said aloud: dead letters are kept for a week


class ReliableRedisBroker(RedisBroker):
    """Dramatiq's Redis broker, where a lost connection and an unreadable message cost nothing else.

    After a lost connection Dramatiq's own forgets the delayed messages it had in memory, retries among them, and
    those whose delivery was lost on the way: they stay with its process, which does nothing with them until
    it ends. Here they go back to the queue when the connection is made anew. And once a minute, because Redis may
    carry out what was asked of it after the asker has given up: when it has stood still, or the network has.

    A message that cannot be read goes to the dead letters as it is, with an error line; there it is known by its
    id in Redis. Dramatiq's own consumer breaks off at it, and leaves behind what it fetched together with it.
    """

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        #: Ids in Redis of what this process has in its queues and threads, by queue.
        self.in_hand: defaultdict[str, set[str]] = defaultdict(set)

    @staticmethod
    def adopt(broker: Broker) -> None:
        """Make a Redis broker of Dramatiq's own class one of these, with its parameters.

        A subclass gets the maintenance only, any other broker nothing.
        """
        if isinstance(broker, RedisBroker) and broker.maintenance_chance == DEFAULT_MAINTENANCE_CHANCE:
            broker.maintenance_chance = MAINTENANCE_SCALE
        if type(broker) is RedisBroker:
            change_class(broker, ReliableRedisBroker)
            broker.in_hand = defaultdict(set)  # type: ignore[attr-defined]

    @property
    def consumer_class(self) -> type[RedisConsumer]:
        return _Consumer

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> Consumer:
        """A new consumer for a queue; called by Dramatiq at the start and after each lost connection."""
        if queue_name != q_name(queue_name):
            self.in_hand.pop(queue_name, None)  # delayed messages were in the memory of the consumer before
        with _connected():
            self.requeue_strays(queue_name)
        return super().consume(queue_name, prefetch, timeout)

    def requeue_strays(self, queue_name: str) -> None:
        """Put back what Redis has given to this process, and nobody in it has.

        To be called by the one thread that fetches from this queue, while it has nothing that it has not handed out.
        """
        # Asked before looking at what is in hand: what is acknowledged meanwhile is not put back by Redis.
        mine: Any = self.client.smembers(self._taken(queue_name))
        strays = {redis_id.decode() for redis_id in mine} - self.in_hand[queue_name]
        if strays:
            logger.warning("Lost deliveries requeued", queue=queue_name, messages=len(strays))
            self.do_requeue(queue_name, *strays)

    def do_fetch(self, queue_name: str, count: int) -> list[bytes | None]:
        """Take up to `count` messages from the queue for this process; called by Dramatiq's consumer."""
        fetched = fetch(self, queue_name, count)
        unreadable = {body: why for body in fetched if body is not None and (why := _wrong_with(body, queue_name))}
        if unreadable:
            self._bury(queue_name, unreadable)
        return [body for body in fetched if body not in unreadable]

    def _bury(self, queue_name: str, unreadable: dict[bytes, str]) -> None:
        try:
            ids: Any = list(self.client.smembers(self._taken(queue_name)))
            bodies: Any = self.client.hmget(f"{self.namespace}:{queue_name}.msgs", ids)
            for redis_id, body in zip(ids, bodies, strict=True):
                if body in unreadable:
                    self.do_nack(queue_name, redis_id)
                    logger.error(
                        "Unreadable message moved to the dead letters",
                        queue=queue_name,
                        redis_message_id=redis_id.decode(),
                        error=unreadable[body],
                    )
        except redis.RedisError as error:
            # They stay with this process until it consumes anew, and are looked at again then.
            logger.error("Unreadable messages could not be moved", queue=queue_name, error=error_line(error))

    def _taken(self, queue_name: str) -> str:
        return f"{self.namespace}:__acks__.{self.broker_id}.{queue_name}"


class _Consumer(RedisConsumer):
    """Dramatiq's consumer, which says what it hands out, and takes a Redis that is too slow for one that is away."""

    broker: ReliableRedisBroker

    def __init__(self, broker: ReliableRedisBroker, queue_name: str, prefetch: int, timeout: int) -> None:
        super().__init__(broker, queue_name, prefetch, timeout)
        self._freed = threading.Event()
        self._looks_at = _next_look()

    def __next__(self) -> MessageProxy | None:
        with _connected():
            if not self.message_cache and time.monotonic() >= self._looks_at:
                self.broker.requeue_strays(self.queue_name)
                self._looks_at = _next_look()
            if not self.message_cache and self.outstanding_message_count >= self.prefetch:
                self._wait_for_a_free_hand()
                return None
            message: MessageProxy | None = super().__next__()
        if message is not None:
            self.broker.in_hand[self.queue_name].add(message.options["redis_message_id"])
        return message

    def ack(self, message: MessageProxy) -> None:
        with _connected():
            super().ack(message)
        self._let_go(message)

    def nack(self, message: MessageProxy) -> None:
        with _connected():
            super().nack(message)
        self._let_go(message)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        given = list(messages)
        with _connected():
            super().requeue(given)
        for message in given:
            self._let_go(message)

    def _wait_for_a_free_hand(self) -> None:
        """Wait until a message is done, no longer than the timeout.

        Dramatiq's own sleeps, longer each time, and says nothing to Redis meanwhile: a process whose hands are
        full of long runs is taken for dead, and its messages are given to others.
        """
        self._freed.clear()
        if self.outstanding_message_count >= self.prefetch:
            self.broker.do_qsize(self.queue_name)  # any command is a heartbeat
            self._freed.wait(self.timeout / 1000)

    def _let_go(self, message: MessageProxy) -> None:
        self._freed.set()
        self.broker.in_hand[self.queue_name].discard(message.options["redis_message_id"])


def _next_look() -> float:
    """When to look for strays again: they wait no longer than the messages of a killed worker."""
    return time.monotonic() + HEARTBEAT_TIMEOUT_MS / 1000


@contextmanager
def _connected() -> Iterator[None]:
    """Turn redis-py's errors into the one after which Dramatiq tries again; any other ends its thread."""
    try:
        yield
    except redis.RedisError as error:
        raise ConnectionClosed(error) from None


def redis_broker(settings: Settings) -> RedisBroker:
    """A Redis broker by the settings; it has no middleware yet.

    Raises:
      SettingsError: When no URL is set, or redis-py cannot read it.
    """
    return ReliableRedisBroker(
        client=redis_client(settings.broker_url or settings.require_redis_url()),
        namespace=f"{settings.namespace}:broker",
        middleware=[],
        # Each command looks for messages of dead workers; by default 1 in 1000 does, which takes 10 minutes.
        maintenance_chance=MAINTENANCE_SCALE,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_MS,
        dead_message_ttl=DEAD_MESSAGE_TTL_MS,
    )


def _wrong_with(body: bytes, queue_name: str) -> str:
    """Why Dramatiq's consumer would break off at this message; empty when it would not."""
    message, why = read(body, queue_name)
    if message is not None and not isinstance(message.options.get("redis_message_id"), str):
        return "it has no redis_message_id in its options"
    return why
