"""Bulk enqueueing: many messages of an actor in a few round trips for each thousand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final, TypeVar

from dramatiq import Actor, Message

from housekeeping.middleware.enqueueing.path import EnqueuePath

R = TypeVar("R")

#: Messages per round trip. Limits the memory used, and how long other clients of Redis wait (about 10 ms).
BATCH_SIZE: Final = 1000


def enqueue_many(actor: Actor[..., R], calls: Iterable[Any], **options: Any) -> list[Message[R]]:
    """Send one message per call, deduplicated like `send`, in a few round trips for each thousand.

    ::

        housekeeping.enqueue_many(clean_up, [1, 2, 3])
        housekeeping.enqueue_many(copy, [("a", "b"), ("c", "d")])

    As with `send`, every middleware's ``before_enqueue`` sees every message, ``after_enqueue`` sees the enqueued ones,
    and a message and its key are written together. A call that is given twice is enqueued once.

    Parameters:
      calls: A tuple or list holds the arguments of a call. Anything else is the call's only argument.
      options: Message options, as for `send_with_options`, but no delay.

    Returns:
      One message for each call, in order. A dropped message is marked with ``options["duplicate_of"]``.

    Raises:
      TypeError: When a delay is given.
      MiddlewareError: When a middleware rejects a message, or Redis does not answer. Of the thousand in question
        either all are enqueued or none. Earlier thousands are enqueued.
      redis.RedisError: The same, when the actor's messages are not deduplicated or the keys are on another Redis.
        Keys reserved there expire within seconds.
      dramatiq.errors.ConnectionClosed: The same for RabbitMQ.

    Note: On RabbitMQ, keys are reserved for a few seconds before, and confirmed after. On any other broker, or on one
    with its own `enqueue`, each message is enqueued by itself.
    """
    if "delay" in options:
        raise TypeError("enqueue_many takes no delay; send_with_options does")
    broker = actor.broker
    path = broker.enqueue if isinstance(broker.enqueue, EnqueuePath) else EnqueuePath(broker)
    messages = (actor.message_with_options(args=_arguments(call), **options) for call in calls)
    sent: list[Message[Any]] = []
    while batch := list(itertools.islice(messages, BATCH_SIZE)):
        sent += path.send_many(batch)
    return sent


def _arguments(call: Any) -> tuple[Any, ...]:
    return tuple(call) if isinstance(call, tuple | list) else (call,)
