"""Many messages and their keys at once: in one transaction of Redis, where queue and keys share it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.middleware_errors import SkipEnqueue, fail_message_on_error
from housekeeping.core.redis_client import translate_redis_errors
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.middleware.deduplication.enqueueing import AT_ONCE, EnqueueingWithKeys, alike, dispatch_arguments
from housekeeping.middleware.deduplication.keys import DeduplicationKeys, KeyStep, text
from housekeeping.middleware.deduplication.steps import refuse_duplicate

logger = named_logger(__name__)

Messages = Sequence[Message[Any]]
Steps = Sequence[KeyStep | None]


def take_together(
    broker: RedisBroker, enqueueing: EnqueueingWithKeys | None, messages: Messages, steps: Steps
) -> dict[int, SkipEnqueue]:
    """Enqueue them with their keys, all or none; returns why some were not, by their place.

    Parameters:
      enqueueing: None when no message has a step.

    Raises:
      StoreUnavailable: When Redis does not answer and messages have keys; it may have done it all the same.
      redis.RedisError: The same, when none has a key.
    """
    dispatch: Any = broker.scripts["dispatch"]
    commands = list(_commands(messages, steps if enqueueing else [None] * len(messages)))
    with fail_message_on_error() if any(steps) else nullcontext(), broker.client.pipeline(transaction=True) as pipeline:
        for number, command in enumerate(commands):
            message, step = command[0]
            # The broker's maintenance once for all of them.
            given = dispatch_arguments(broker, message.queue_name, message, maintenance=number == 0)
            if enqueueing is None or step is None:
                dispatch(keys=[broker.namespace], args=given, client=pipeline)
            elif alike(step) is None:
                enqueueing.enqueue(step, given, pipeline)
            else:
                bodies = [given[-1], *(message.encode() for message, _ in command[1:])]
                enqueueing.enqueue_many([step for _, step in command if step], given, bodies, pipeline)
        answers = pipeline.execute()
    return _refused(
        steps, (holder for answer in answers for holder in (answer if isinstance(answer, list) else [answer]))
    )


def take_with_keys_elsewhere(
    send: Callable[[Messages], object], keys: DeduplicationKeys, messages: Messages, steps: Steps
) -> dict[int, SkipEnqueue]:
    """The same where keys are on a server other than the queue's: reserved for seconds before, confirmed after.

    Parameters:
      send: Enqueues those whose keys are reserved, all or none; what it raises is raised.

    Raises:
      StoreUnavailable: When the keys' Redis does not answer; what was reserved is free again within seconds.
    """
    with fail_message_on_error(), keys.client.pipeline(transaction=False) as pipeline:
        for step in steps:
            if step is not None:
                keys.queue(step, pipeline)
        holders = iter(pipeline.execute())
    skips = _refused(steps, ["" if step is None else next(holders) for step in steps])
    left = [number for number in range(len(messages)) if number not in skips]
    if left:
        send([messages[number] for number in left])
        _confirm(keys, (step for number in left if (step := steps[number]) is not None))
    return skips


def _commands(messages: Messages, steps: Steps) -> Iterator[list[tuple[Message[Any], KeyStep | None]]]:
    """What goes into one command each, in order: claims that are alike together, anything else by itself."""

    def of_command(each: tuple[Message[Any], KeyStep | None]) -> object:
        message, step = each
        together = alike(step) if step is not None else None
        return None if together is None else (message.queue_name, together)

    for together, some in itertools.groupby(zip(messages, steps, strict=True), of_command):
        while command := list(itertools.islice(some, 1 if together is None else AT_ONCE)):
            yield command


def _confirm(keys: DeduplicationKeys, steps: Iterable[KeyStep]) -> None:
    try:
        with translate_redis_errors(), keys.client.pipeline(transaction=False) as pipeline:
            for step in steps:
                keys.confirm(step, pipeline)
            pipeline.execute()
    except RedisUnavailable as error:
        logger.warning("Keys may be free before their messages have ended", error=str(error))


def _refused(steps: Steps, answers: Iterable[Any]) -> dict[int, SkipEnqueue]:
    refused: dict[int, SkipEnqueue] = {}
    for number, (step, holder) in enumerate(zip(steps, answers, strict=True)):
        try:
            if step is not None:
                refuse_duplicate(step, text(holder))
        except SkipEnqueue as skip:
            refused[number] = skip
    return refused
