"""Enqueues many messages of an actor at once, in a few round trips for each thousand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final
from uuid import uuid4

from dramatiq import Actor, Message
from dramatiq.brokers.redis import RedisBroker

from housekeeping.foundation.steering import SkipEnqueue
from housekeeping.middleware.bulk_steps import take_together, take_with_keys_elsewhere
from housekeeping.middleware.deduplication import Deduplication
from housekeeping.middleware.deduplication_keys import Step
from housekeeping.middleware.enqueueing import dropped

#: Messages a round trip: bounds what is held in memory, and how long Redis serves nobody else (some 50 ms).
BATCH_SIZE: Final = 1000


def enqueue_many(actor: Actor[..., Any], calls: Iterable[Any], **options: Any) -> list[Message[Any]]:
    """Send an actor one message for each call, deduplicated as `send` would, in a few round trips for each thousand.

    ::

        housekeeping.enqueue_many(clean_up, [1, 2, 3])
        housekeeping.enqueue_many(copy, [("a", "b"), ("c", "d")])

    Every middleware's ``before_enqueue`` sees every message, as with `send`, and ``after_enqueue`` those that are in
    the queue. A message and its key are taken together, as with `send`. The same call twice is enqueued once.

    Parameters:
      calls: A tuple or list is the arguments of a call; anything else is its only argument.
      options: Message options, as for `send_with_options`; but no delay.

    Returns:
      One message for each call, in order; one that was dropped is marked with ``options["duplicate_of"]``.

    Raises:
      TypeError: When a delay is asked for.
      MiddlewareError: When a middleware refuses a message, or Redis does not answer. Of its thousand either all are
        enqueued or none, those before it are.
      redis.RedisError: The same, when the actor's messages are not deduplicated, or the keys are on another Redis:
        keys taken there are free again within seconds.

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
        sent += _Bulk(broker, batch).enqueued()
    return sent


def _arguments(call: Any) -> tuple[Any, ...]:
    return tuple(call) if isinstance(call, tuple | list) else (call,)


class _Bulk:
    """Up to a thousand messages on their way past the middleware into one queue."""

    def __init__(self, broker: RedisBroker, given: Sequence[Message[Any]]) -> None:
        self._broker = broker
        self._deduplication = next((each for each in broker.middleware if isinstance(each, Deduplication)), None)
        # An id of its own in Redis, because a retry has the message's: as the broker's `enqueue` does it.
        self._given = given
        self._messages = [message.copy(options={"redis_message_id": str(uuid4())}) for message in given]
        self._skips: dict[int, SkipEnqueue] = {}

    def enqueued(self) -> list[Message[Any]]:
        """Enqueue those that no middleware drops; returns one message for each."""
        nothing: AbstractContextManager[dict[str, Step]] = nullcontext({})
        with self._deduplication.preparing(many=True) if self._deduplication else nothing as steps:
            for place, message in enumerate(self._messages):
                try:
                    self._broker.emit_before("enqueue", message, None)
                except SkipEnqueue as skip:
                    self._skips[place] = skip
        self._take(steps)
        for place, message in self._left():
            if place not in self._skips:
                self._broker.emit_after("enqueue", message, None)
        return [
            dropped(self._given[place], self._skips[place]) if place in self._skips else message
            for place, message in enumerate(self._messages)
        ]

    def _left(self) -> list[tuple[int, Message[Any]]]:
        return [(place, message) for place, message in enumerate(self._messages) if place not in self._skips]

    def _take(self, steps: dict[str, Step]) -> None:
        """Put all that are left into the queue, but those whose key another holds."""
        left = self._left()
        if not left:
            return
        messages = [message for _, message in left]
        with_steps = [steps.get(message.options["redis_message_id"]) for message in messages]
        together = self._deduplication.together if self._deduplication else None
        if self._deduplication is None or together is not None or not any(with_steps):
            skips = take_together(self._broker, together, messages, with_steps)
        else:
            skips = take_with_keys_elsewhere(self._broker, self._deduplication.keys, messages, with_steps)
        self._skips |= {left[number][0]: skip for number, skip in skips.items()}
