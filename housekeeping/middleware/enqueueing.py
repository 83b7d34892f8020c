"""Lets a middleware drop a message on its way into the queue, at no cost to its sender."""

from __future__ import annotations

import functools
from typing import Any

from dramatiq import Broker, Message

from housekeeping.foundation.db import one_line
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.steering import SkipEnqueue
from housekeeping.middleware.schedule import Schedule, sent_by_scheduler

logger = named_logger(__name__)


def accept_skips(broker: Broker, schedule: Schedule) -> None:
    """Make the broker's `enqueue` return a skipped message to its sender, as if it had been sent.

    Every way into a queue passes here: ``send``, groups, pipelines, periodiq, retries, and delayed
    messages that come due. The message comes back marked with ``options["duplicate_of"]``.

    A tick that cannot be enqueued is logged, not raised: periodiq would die of it. The tick is given
    back, so the next minute sends it.
    """
    enqueue = broker.enqueue

    def claim_and_enqueue(message: Message[Any], delay: int | None) -> Message[Any]:
        claimed = schedule.claim(broker, message)
        try:
            return enqueue(claimed, delay=delay)
        except SkipEnqueue as skip:
            schedule.tick_skipped(claimed, skip.reason)
            raise
        except Exception:
            if claimed is not message:
                schedule.forget(broker, claimed)
            raise

    @functools.wraps(enqueue)
    def enqueue_or_skip(message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        try:
            return claim_and_enqueue(message, delay)
        except SkipEnqueue as skip:
            logger.info(
                "Message not enqueued",
                job_status=skip.reason,
                worker=message.actor_name,
                message_id=message.message_id,
                duplicate_of=skip.duplicate_of,
            )
            return message.copy(options={"duplicate_of": skip.duplicate_of})
        except Exception as error:
            if not sent_by_scheduler(message):
                raise
            logger.error(
                "Tick could not be sent, tried again in a minute", worker=message.actor_name, error=one_line(error)
            )
            return message

    broker.enqueue = enqueue_or_skip  # type: ignore[method-assign]
