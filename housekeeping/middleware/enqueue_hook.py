"""Lets a middleware drop a message on its way into the queue, at no cost to its sender."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

from dramatiq import Broker, Message

from housekeeping.core.middleware_errors import SkipEnqueue
from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.middleware.deduplication.middleware import Deduplication
from housekeeping.middleware.retries import Retries
from housekeeping.middleware.schedule.middleware import Schedule, sent_by_scheduler

logger = named_logger(__name__)


def accept_skips(broker: Broker, schedule: Schedule) -> None:
    """Make the broker's `enqueue` return a skipped message to its sender, as if it had been sent.

    Every way into a queue passes here: ``send``, groups, pipelines, periodiq, retries, and delayed
    messages that come due. The message comes back marked with ``options["duplicate_of"]``.

    A tick that cannot be enqueued is logged, not raised: periodiq would die of it. The claim to the tick
    ends by itself, so the next minute sends it.
    """
    deduplication = next((each for each in broker.middleware if isinstance(each, Deduplication)), None)
    if deduplication is not None:
        deduplication.work_with(broker)
    preparing = nullcontext if deduplication is None else deduplication.preparing
    retries = next((each for each in broker.middleware if isinstance(each, Retries)), None)
    enqueue = broker.enqueue

    def claim_and_enqueue(message: Message[Any], delay: int | None) -> Message[Any]:
        claimed = schedule.claim(broker, message)
        try:
            with preparing():
                # A copy, as Dramatiq's Redis broker makes one: the marks that a try leaves in it are not true of the
                # next try if that one fails.
                enqueued = enqueue(claimed.copy(), delay=delay)
        except SkipEnqueue as skip:
            if retries is not None:
                retries.clear_waiting_mark(broker, message)
            if claimed is message:
                schedule.tick_skipped(message, skip.reason)
            else:
                schedule.dropped(claimed, skip)
            raise
        if claimed is not message:
            schedule.sent(claimed)
        return enqueued

    @functools.wraps(enqueue)
    def enqueue_or_skip(message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        try:
            return claim_and_enqueue(message, delay)
        except SkipEnqueue as skip:
            return dropped(message, skip)
        except Exception as error:
            if not sent_by_scheduler(message):
                raise
            logger.error(
                "Tick could not be sent, tried again in a minute", worker=message.actor_name, error=error_line(error)
            )
            return message

    broker.enqueue = enqueue_or_skip  # type: ignore[method-assign]


def dropped(message: Message[Any], skip: SkipEnqueue) -> Message[Any]:
    """The message as its sender gets it back, after the one log line and the one count about it."""
    logger.info(
        "Message not enqueued",
        job_status=skip.reason,
        worker=message.actor_name,
        message_id=message.message_id,
        duplicate_of=skip.duplicate_of,
    )
    if skip.reason == "deduplicated":
        metrics.count_deduplicated(message.actor_name)
    return message.copy(options={"duplicate_of": skip.duplicate_of})
