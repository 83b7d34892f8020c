"""Enqueueing of messages: runs the hooks before, writes message and deduplication key, runs the hooks after."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from uuid import uuid4

from dramatiq import Broker, Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis, dq_name

from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.middleware_errors import SkipEnqueue, fail_message_on_error
from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.middleware.data_consistency import DataConsistency
from housekeeping.middleware.deduplication.keys import DeduplicationKeys, KeyStep
from housekeeping.middleware.deduplication.middleware import Deduplication
from housekeeping.middleware.deduplication.steps import copy_id, duplicate_of
from housekeeping.middleware.dramatiq_internals import enqueues_by_dispatch
from housekeeping.middleware.enqueueing.redis_queues import RedisQueues, share_redis
from housekeeping.middleware.retries import Retries
from housekeeping.middleware.schedule.middleware import Schedule, sent_by_scheduler

logger = named_logger(__name__)

#: A message that was enqueued, or the reason why it was not.
Sent = Message[Any] | SkipEnqueue


def replace_enqueue(broker: Broker) -> None:
    """Replace the broker's ``enqueue`` by `EnqueuePath`; called once, after all middleware is added."""
    broker.enqueue = EnqueuePath(broker)  # type: ignore[method-assign]


class EnqueuePath:
    """Replacement for a broker's ``enqueue`` that writes message and key together, and marks dropped messages.

    All messages pass here: from ``send``, `enqueue_many`, groups, pipelines, periodiq and retries, and delayed ones
    that are due. A dropped message raises no error; it is returned with ``options["duplicate_of"]``.

    First the ``before_enqueue`` hooks may drop messages, and choose the changes of keys. Then messages and keys are
    written. If they share a Redis, one script writes both; else the keys are reserved first and confirmed afterward.
    Last, the ``after_enqueue`` hooks see the enqueued messages.

    A broker with its own ``enqueue`` keeps it and runs the hooks itself. `Deduplication` then reserves each key in
    ``before_enqueue`` and confirms it in ``after_enqueue``.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._brokers_own = broker.enqueue
        self._deduplication = _find(broker, Deduplication)
        self._consistency = _find(broker, DataConsistency)
        self._retries = _find(broker, Retries)
        self._schedule = _find(broker, Schedule)
        keys = self._deduplication.keys if self._deduplication else None
        self._redis: RedisQueues | None = None
        if isinstance(broker, RedisBroker) and enqueues_by_dispatch(broker):
            shared = keys if keys is not None and share_redis(broker.client, keys.client) else None
            self._redis = RedisQueues(broker, shared)
            if shared is not None:
                shared.share_redis_with_queues(broker.namespace)

    def __call__(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Enqueue one message, as the broker's ``enqueue`` does; `delay` is in milliseconds.

        A tick that cannot be enqueued is logged, not raised, because periodiq would end. Its claim expires, so the
        next minute sends it.
        """
        try:
            claimed = self._schedule.claim(self._broker, message) if self._schedule else message
            sent = self._send(claimed, delay)
        except SkipEnqueue as skip:  # the tick was sent before
            return returned_to_sender(message, skip)
        except Exception as error:
            if not sent_by_scheduler(message):
                raise
            logger.error(
                "Tick could not be sent, tried again in a minute", worker=message.actor_name, error=error_line(error)
            )
            return message
        if isinstance(sent, SkipEnqueue):
            self._note_skip(message, claimed, sent)
            return returned_to_sender(message, sent)
        if claimed is not message and self._schedule:
            self._schedule.sent(claimed)
        return sent

    def send_many(self, messages: Sequence[Message[Any]]) -> list[Message[Any]]:
        """Enqueue new messages of one actor at once; returns one message for each."""
        if self._redis is None and _put_many(self._broker) is None:
            return [self._broker.enqueue(message) for message in messages]
        options = dict(messages[0].options)  # as they were given: hooks leave marks in the messages
        if self._redis is not None:
            for message in messages:
                # The first copy in Redis may have the message's id. Copies for retries get other ids.
                message.options["redis_message_id"] = message.message_id
        return [
            returned_to_sender(dataclasses.replace(message, options=dict(options)), sent)
            if isinstance(sent, SkipEnqueue)
            else sent
            for message, sent in zip(messages, self._pass(messages, None), strict=True)
        ]

    def _send(self, message: Message[Any], delay: int | None) -> Sent:
        if self._redis is not None and self._redis.has_keys:
            # As `RedisBroker.enqueue` does: each copy has an id of its own, because a message may be enqueued again.
            copy = message.copy(options={"redis_message_id": str(uuid4())})
            if delay is not None:
                copy = copy.copy(queue_name=dq_name(message.queue_name), options={"eta": current_millis() + delay})
            return self._pass([copy], delay)[0]
        try:
            with self._deduplication.reserving() if self._deduplication else nullcontext():
                # A copy: the marks that the hooks leave must not stay in the message if this attempt fails.
                return self._brokers_own(message.copy(), delay=delay)
        except SkipEnqueue as skip:
            return skip

    def _pass(self, messages: Sequence[Message[Any]], delay: int | None) -> list[Sent]:
        """Run the ``before_enqueue`` hooks, write messages and keys, and run the ``after_enqueue`` hooks."""
        sent: list[Sent] = list(messages)
        no_steps: AbstractContextManager[dict[str, KeyStep]] = nullcontext({})
        with (
            self._deduplication.collecting_steps() if self._deduplication else no_steps as steps,
            self._consistency.sending_many() if self._consistency else nullcontext(),
        ):
            for number, message in enumerate(messages):
                try:
                    self._broker.emit_before("enqueue", message, delay)
                except SkipEnqueue as skip:
                    sent[number] = skip
        left = {number: each for number, each in enumerate(sent) if isinstance(each, Message)}
        if left:
            chosen = [steps.get(copy_id(message)) for message in left.values()]
            holders = self._write(list(left.values()), chosen)
            for number, step, holder in zip(left, chosen, holders, strict=True):
                if step is not None and (duplicate := duplicate_of(step, holder)):
                    sent[number] = duplicate
        for each in sent:
            if isinstance(each, Message):
                self._broker.emit_after("enqueue", each, delay)
        return sent

    def _write(self, messages: Sequence[Message[Any]], steps: Sequence[KeyStep | None]) -> Sequence[str]:
        """Write messages and keys; return for each message the holder's id if its key is held, else an empty string."""
        if self._redis is not None and (self._redis.has_keys or not any(steps)):
            return self._redis.put(messages, steps)
        if self._deduplication is None or not any(steps):
            self._put(messages)
            return [""] * len(messages)
        # What is reserved for a message that is then not enqueued expires within seconds.
        keys: DeduplicationKeys = self._deduplication.keys
        with fail_message_on_error():
            holders = keys.take_many(steps)
        free = [number for number, step in enumerate(steps) if step is None or not duplicate_of(step, holders[number])]
        if free:
            self._put([messages[number] for number in free])
            try:
                keys.confirm_many([steps[number] for number in free])
            except RedisUnavailable as error:
                logger.warning("Keys may be free before their messages have ended", error=str(error))
        return holders

    def _put(self, messages: Sequence[Message[Any]]) -> None:
        if self._redis is not None:
            self._redis.put(messages, [None] * len(messages))
        elif put_many := _put_many(self._broker):
            put_many(messages)

    def _note_skip(self, message: Message[Any], claimed: Message[Any], skip: SkipEnqueue) -> None:
        if self._retries is not None:
            self._retries.clear_waiting_mark(self._broker, message)
        if self._schedule is not None and claimed is message:
            self._schedule.tick_skipped(message, skip.reason)
        elif self._schedule is not None:
            self._schedule.dropped(claimed, skip)


def returned_to_sender(message: Message[Any], skip: SkipEnqueue) -> Message[Any]:
    """Log and count a dropped message. Return it for its sender, with the option `duplicate_of`."""
    logger.info(
        "Message not enqueued",
        job_status=skip.reason,
        worker=message.actor_name,
        message_id=message.message_id,
        duplicate_of=skip.duplicate_of,
    )
    if skip.reason == "deduplicated":
        metrics.DEDUPLICATED.add(message.actor_name)
    return message.copy(options={"duplicate_of": skip.duplicate_of})


def _put_many(broker: Any) -> Callable[[Sequence[Message[Any]]], None] | None:
    """Return the broker's method that enqueues many messages; None if it has none, or has its own ``enqueue``."""
    owner = next((kind for kind in type(broker).__mro__ if "put_many" in vars(kind)), None)
    if owner is None or type(broker).enqueue is not vars(owner).get("enqueue"):
        return None
    put_many: Callable[[Sequence[Message[Any]]], None] = broker.put_many
    return put_many


def _find(broker: Broker, kind: type[Any]) -> Any:
    return next((each for each in broker.middleware if isinstance(each, kind)), None)
