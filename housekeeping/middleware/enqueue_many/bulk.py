"""Enqueues many messages of an actor at once, in a few round trips for each thousand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

from dramatiq import Actor, Broker, Message
from dramatiq.brokers.redis import RedisBroker

from housekeeping.core.middleware_errors import SkipEnqueue
from housekeeping.middleware.data_consistency import DataConsistency
from housekeeping.middleware.deduplication.keys import KeyStep
from housekeeping.middleware.deduplication.middleware import Deduplication
from housekeeping.middleware.deduplication.steps import copy_id
from housekeeping.middleware.enqueue_hook import dropped
from housekeeping.middleware.enqueue_many.hooks import hooks
from housekeeping.middleware.enqueue_many.steps import Messages, Steps, take_together, take_with_keys_elsewhere

R = TypeVar("R")

#: Messages a round trip: bounds what is held in memory, and how long Redis serves nobody else (some 10 ms).
BATCH_SIZE: Final = 1000


def enqueue_many(actor: Actor[..., R], calls: Iterable[Any], **options: Any) -> list[Message[R]]:
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
      dramatiq.errors.ConnectionClosed: The same of RabbitMQ.

    Note: On RabbitMQ keys are reserved for seconds before, and confirmed after. On a broker of another kind, or with
    an `enqueue` of its own, each message is enqueued by itself.
    """
    if "delay" in options:
        raise TypeError("enqueue_many takes no delay; send_with_options does")
    broker = actor.broker
    messages = (actor.message_with_options(args=_arguments(call), **options) for call in calls)
    bulk = _kind_of_bulk(broker)
    if bulk is None:
        return [broker.enqueue(message) for message in messages]
    sent: list[Message[Any]] = []
    while batch := list(itertools.islice(messages, BATCH_SIZE)):
        sent += bulk(broker, batch).enqueued()
    return sent


def _kind_of_bulk(broker: Broker) -> type[_Bulk] | None:
    """How the broker takes many messages at once; null when it does not, or has an `enqueue` of its own."""
    if isinstance(broker, RedisBroker):
        return _RedisBulk if type(broker).enqueue is RedisBroker.enqueue else None
    own = next((kind for kind in type(broker).__mro__ if "put_many" in vars(kind)), None)
    return _Bulk if own is not None and type(broker).enqueue is vars(own).get("enqueue") else None


def _arguments(call: Any) -> tuple[Any, ...]:
    return tuple(call) if isinstance(call, tuple | list) else (call,)


class _Bulk:
    """Up to a thousand new messages of one actor on their way past the middleware, by the broker's `put_many`."""

    def __init__(self, broker: Any, messages: Sequence[Message[Any]]) -> None:
        self._broker = broker
        self._deduplication = next((each for each in broker.middleware if isinstance(each, Deduplication)), None)
        self._messages = messages
        # As they were given, for those that come back: hooks leave marks in a message's own.
        self._options = dict(messages[0].options)
        self._skips: dict[int, SkipEnqueue] = {}

    def enqueued(self) -> list[Message[Any]]:
        """Enqueue those that no middleware drops; returns one message for each."""
        nothing: AbstractContextManager[dict[str, KeyStep]] = nullcontext({})
        consistency = next((each for each in self._broker.middleware if isinstance(each, DataConsistency)), None)
        with (
            self._deduplication.preparing(many=True) if self._deduplication else nothing as steps,
            consistency.sending_many() if consistency else nullcontext(),
        ):
            ask = hooks(self._broker, "before_enqueue")
            for place, message in enumerate(self._messages):
                try:
                    ask(message)
                except SkipEnqueue as skip:
                    self._skips[place] = skip
        self._take(steps)
        tell = hooks(self._broker, "after_enqueue")
        for _, message in self._left():
            tell(message)
        return [
            dropped(dataclasses.replace(message, options=dict(self._options)), self._skips[place])
            if place in self._skips
            else message
            for place, message in enumerate(self._messages)
        ]

    def _left(self) -> list[tuple[int, Message[Any]]]:
        return [(place, message) for place, message in enumerate(self._messages) if place not in self._skips]

    def _take(self, steps: dict[str, KeyStep]) -> None:
        """Put all that are left into the queue, but those whose key another holds."""
        left = self._left()
        if not left:
            return
        messages = [message for _, message in left]
        skips = self._send_with_keys(messages, [steps.get(copy_id(message)) for message in messages])
        self._skips |= {left[number][0]: skip for number, skip in skips.items()}

    def _send_with_keys(self, messages: Messages, steps: Steps) -> dict[int, SkipEnqueue]:
        if self._deduplication is None or not any(steps):
            self._send(messages)
            return {}
        return take_with_keys_elsewhere(self._send, self._deduplication.keys, messages, steps)

    def _send(self, messages: Messages) -> None:
        self._broker.put_many(messages)


class _RedisBulk(_Bulk):
    """The same on a Redis broker."""

    def __init__(self, broker: Any, messages: Sequence[Message[Any]]) -> None:
        super().__init__(broker, messages)
        for message in messages:
            # Its first copy in Redis may have the message's id: those of its retries are given others.
            message.options["redis_message_id"] = message.message_id

    def _send_with_keys(self, messages: Messages, steps: Steps) -> dict[int, SkipEnqueue]:
        together = self._deduplication.together if self._deduplication else None
        if together is None:
            return super()._send_with_keys(messages, steps)
        return take_together(self._broker, together, messages, steps)

    def _send(self, messages: Messages) -> None:
        take_together(self._broker, None, messages, [None] * len(messages))
