"""Retries with growing delays; a retry is neither lost nor piled up beside its schedule."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import dramatiq.middleware
import redis
from dramatiq import Broker, Message, MessageProxy
from dramatiq.errors import BrokerConnectionError, Retry

from housekeeping.foundation.cron import Cron
from housekeeping.foundation.db import one_line
from housekeeping.foundation.errors import RedisUnavailable
from housekeeping.foundation.leases import RedisLeaseStore
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.steering import PutBack, StoreUnavailable
from housekeeping.middleware.arguments import digest

logger = named_logger(__name__)

MAX_RETRIES: Final = 25  # semantics.md, R1
#: The mark of a waiting retry outlives its due time by this long, for a queue that is behind.
_BEHIND: Final = timedelta(hours=1)
_PAUSE_S: Final = 1.0  # between two tries to enqueue while Redis is away


def delay_before(retry: int, chance: Callable[[int, int], int] = random.randint) -> timedelta:
    """How long to wait before the retry of this number, from 0: about 18 s, 24 s, 50 s, 2 min, ... 4 days.

    Parameters:
      chance: Draws a whole number between two, so that what failed together does not come back together.
    """
    return timedelta(seconds=retry**4 + 15 + chance(0, 9) * (retry + 1))  # semantics.md, R1


class Retries(dramatiq.middleware.Retries):
    """Dramatiq's retries with other delays, and with nothing lost.

    Dramatiq's own options keep their meaning and win: ``max_retries``, ``min_backoff``, ``max_backoff``,
    ``retry_when``, ``throws``, ``on_retry_exhausted``, ``raise dramatiq.Retry(delay=...)``.

    For an actor with a schedule no delay is longer than its period, and at most one of its messages
    waits for a retry: beside it, a failed one is not tried again, because the next tick does its work.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        super().__init__(max_retries=MAX_RETRIES)
        self._waiting = RedisLeaseStore(client, namespace, kind="retry")

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        if isinstance(exception, PutBack):
            _enqueue_at_last(broker, message, exception.delay or None)
            return
        actor = broker.get_actor(message.actor_name)
        cron = actor.options.get("periodic")
        mark = f"{actor.actor_name}:{digest(actor, message.args, message.kwargs)}" if isinstance(cron, Cron) else None
        if exception is None:
            if mark is not None and "retries" in message.options:
                self._unmark(mark, message.message_id)
            return
        if mark is not None and self._another_waits(mark, message.message_id):
            logger.warning("Not retried: a retry of this actor waits already", job_status="retry_waits")
            return
        super().after_process_message(
            _RetryBroker(broker, lambda delay: self._delay(broker, message, exception, delay)),
            message,
            exception=exception,
        )
        if mark is not None and message.failed:
            self._unmark(mark, message.message_id)

    def _delay(self, broker: Broker, message: MessageProxy, exception: BaseException, given: int) -> int:
        """Ours, unless the exception, the message or the actor says otherwise."""
        options = {**broker.get_actor(message.actor_name).options, **message.options}
        if (isinstance(exception, Retry) and exception.delay is not None) or {"min_backoff", "max_backoff"} & set(
            options
        ):
            return given
        delay = delay_before(message.options["retries"] - 1)
        cron = options.get("periodic")
        if isinstance(cron, Cron):
            delay = min(delay, cron.period(datetime.now(UTC)))
        return int(delay.total_seconds() * 1000)

    def _another_waits(self, mark: str, message_id: str) -> bool:
        try:
            return self._waiting.obtain(mark, message_id, _BEHIND) != message_id
        except RedisUnavailable:
            return False  # one retry too many is better than none

    def _unmark(self, mark: str, message_id: str) -> None:
        try:
            self._waiting.release(mark, message_id)
        except RedisUnavailable as error:
            logger.warning("Mark of a waiting retry stays until it expires", error=str(error))


class _RetryBroker:
    """Stands in for the broker where Dramatiq enqueues a retry: sets the delay, and does not give up."""

    def __init__(self, broker: Broker, delay: Callable[[int], int]) -> None:
        self._broker = broker
        self._delay = delay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def enqueue(self, message: Message[Any] | MessageProxy, *, delay: int) -> None:
        _enqueue_at_last(self._broker, message, self._delay(delay))


def _enqueue_at_last(broker: Broker, message: Message[Any] | MessageProxy, delay: int | None) -> None:
    """Enqueue, and while Redis is away try again.

    An error raised here would be swallowed by Dramatiq, and the message acknowledged: lost. Waiting costs
    nothing, because without Redis this thread gets no other message; a process that ends meanwhile has
    not acknowledged it, and the broker delivers it again.
    """
    while True:
        try:
            broker.enqueue(message, delay=delay)  # type: ignore[arg-type]
            return
        except (redis.RedisError, BrokerConnectionError, StoreUnavailable) as error:
            logger.warning("A retry cannot be enqueued yet", error=one_line(error))
            time.sleep(_PAUSE_S)
