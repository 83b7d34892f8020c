"""Enqueues many messages of an actor at once, in a few round trips for each thousand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final
from uuid import uuid4

from dramatiq import Actor, Message, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis
from dramatiq.middleware import MiddlewareError
from redis.client import Pipeline

from housekeeping.foundation.errors import RedisUnavailable
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.steering import SkipEnqueue
from housekeeping.middleware.bulk_keys import KeysOfMany
from housekeeping.middleware.deduplication import Deduplication

logger = named_logger(__name__)

#: Messages a round trip: bounds what is held in memory, and how long Redis serves nobody else (some 50 ms).
BATCH_SIZE: Final = 1000


def enqueue_many(actor: Actor[..., Any], calls: Iterable[Any], **options: Any) -> list[Message[Any]]:
    """Send an actor one message for each call, deduplicated as `send` would, in a few round trips for each thousand.

    ::

        housekeeping.enqueue_many(clean_up, [1, 2, 3])
        housekeeping.enqueue_many(copy, [("a", "b"), ("c", "d")])

    Every middleware's ``before_enqueue`` and ``after_enqueue`` sees every message, in their usual order; but one
    middleware after the other sees all messages of a thousand, and the keys of deduplication are confirmed together
    with the enqueueing. The same call twice is enqueued once.

    Parameters:
      calls: A tuple or list is the arguments of a call; anything else is its only argument.
      options: Message options, as for `send_with_options`; but no delay.

    Returns:
      One message for each call, in order; one that was dropped is marked with ``options["duplicate_of"]``.

    Raises:
      TypeError: When a delay is asked for.
      MiddlewareError: When a middleware refuses a message, or keys are kept on a Redis that does not answer. Nothing
        of its thousand is enqueued, those before it are; keys taken are free again within seconds.
      redis.RedisError: When the broker's Redis does not answer; either all of its thousand are enqueued, or none.

    Note: On a broker other than Dramatiq's for Redis, or with an `enqueue` of its own, each is enqueued by itself.
    """
    if "delay" in options:
        raise TypeError("enqueue_many takes no delay; send_with_options does")
    broker = actor.broker
    messages = (actor.message_with_options(args=_arguments(call), **options) for call in calls)
    if not isinstance(broker, RedisBroker) or type(broker).enqueue is not RedisBroker.enqueue:
        return [broker.enqueue(message) for message in messages]
    sent: list[Message[Any]] = []
    while batch := list(itertools.islice(messages, BATCH_SIZE)):
        sent += _Bulk(broker, actor, batch).enqueued()
    return sent


def _arguments(call: Any) -> tuple[Any, ...]:
    return tuple(call) if isinstance(call, tuple | list) else (call,)


class _Bulk:
    """Up to a thousand messages on their way past the middleware into one queue."""

    def __init__(self, broker: RedisBroker, actor: Actor[..., Any], given: Sequence[Message[Any]]) -> None:
        self._broker = broker
        self._actor = actor
        # An id of its own in Redis, because a retry has the message's: as the broker's `enqueue` does it.
        self._given = given
        self._messages = [message.copy(options={"redis_message_id": str(uuid4())}) for message in given]
        self._skips: dict[int, SkipEnqueue] = {}

    def enqueued(self) -> list[Message[Any]]:
        """Enqueue those that no middleware drops; returns one message for each."""
        keys: KeysOfMany | None = None
        for middleware in self._broker.middleware:
            if isinstance(middleware, Deduplication):
                keys = KeysOfMany(middleware, self._actor)
                self._skips |= keys.claim(self._left())
            else:
                self._before(middleware)
        left = [message for _, message in self._left()]
        if left:
            self._push(left, keys)
        for middleware in reversed(self._broker.middleware):
            self._after(middleware, left)
        return [
            _dropped(self._given[place], self._skips[place]) if place in self._skips else message
            for place, message in enumerate(self._messages)
        ]

    def _left(self) -> list[tuple[int, Message[Any]]]:
        return [(place, message) for place, message in enumerate(self._messages) if place not in self._skips]

    def _before(self, middleware: Middleware) -> None:
        """A middleware's hook for each message; its errors mean what they mean to Dramatiq's `emit_before`."""
        for place, message in self._left():
            try:
                middleware.before_enqueue(self._broker, message, None)  # type: ignore[arg-type]
            except SkipEnqueue as skip:
                self._skips[place] = skip
            except MiddlewareError:
                raise
            except Exception:
                self._broker.logger.critical("Unexpected failure in before_enqueue of %r.", middleware, exc_info=True)

    def _after(self, middleware: Middleware, messages: Iterable[Message[Any]]) -> None:
        for message in messages:
            try:
                middleware.after_enqueue(self._broker, message, None)  # type: ignore[arg-type]
            except Exception:
                self._broker.logger.critical("Unexpected failure in after_enqueue of %r.", middleware, exc_info=True)

    def _push(self, messages: Sequence[Message[Any]], keys: KeysOfMany | None) -> None:
        """All into the queue in one transaction of Redis, and their keys with them where they share it."""
        together = keys is not None and keys.on_the_redis_of(self._broker.client)
        with self._broker.client.pipeline(transaction=True) as pipeline:
            for number, message in enumerate(messages):
                self._dispatch(pipeline, message, first=number == 0)
            if keys is not None and together:
                keys.confirm(pipeline, messages)
            pipeline.execute()
        if keys is not None and not together:
            try:
                keys.confirm_by_themselves(messages)
            except RedisUnavailable as error:
                logger.warning("Keys may be free before their messages have ended", error=str(error))

    def _dispatch(self, pipeline: Pipeline, message: Message[Any], *, first: bool) -> None:
        """What the broker's `do_enqueue` sends, on a pipeline; its maintenance once for all of them."""
        broker: Any = self._broker
        broker.scripts["dispatch"](
            keys=[broker.namespace],
            args=[
                "enqueue",
                current_millis(),
                message.queue_name,
                broker.broker_id,
                broker.heartbeat_timeout,
                broker.dead_message_ttl,
                broker._should_do_maintenance("enqueue") if first else 0,
                broker._max_unpack_size(),
                message.options["redis_message_id"],
                message.encode(),
            ],
            client=pipeline,
        )


def _dropped(message: Message[Any], skip: SkipEnqueue) -> Message[Any]:
    """The message as its sender gets it back, after the one log line about it: as `enqueueing` does it."""
    logger.info(
        "Message not enqueued",
        job_status=skip.reason,
        worker=message.actor_name,
        message_id=message.message_id,
        duplicate_of=skip.duplicate_of,
    )
    return message.copy(options={"duplicate_of": skip.duplicate_of})
