"""Retries with growing delays. No retry is lost, and retries of a scheduled actor do not accumulate."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import dramatiq.middleware
import redis
from dramatiq import Actor, Broker, Message, MessageProxy
from dramatiq.common import current_millis
from dramatiq.errors import Retry
from dramatiq.middleware import Shutdown
from dramatiq.middleware.retries import DEFAULT_MAX_BACKOFF, DEFAULT_MIN_BACKOFF

from housekeeping.core.cron import Cron
from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.middleware_errors import InvalidOption, Requeue
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.leases.store import RedisLeaseStore
from housekeeping.middleware.call_keys import message_digest
from housekeeping.middleware.deduplication.options import DEDUP_STATE, SUPERSEDED, has_dependents
from housekeeping.middleware.reliable_enqueue import ReliableBroker, enqueue_reliably

logger = named_logger(__name__)

MAX_RETRIES: Final = 25  # promise R1
#: Longest delay before a retry of work that a scheduler rediscovers. No document has a number. Work should resume
#: within minutes after an outage, and 10 minutes is the lease of document 58 (排他制御), its longest wait.
REDISCOVERED_DELAY: Final = timedelta(minutes=10)
#: How long the mark of a waiting retry outlives its due time, for a worker that is slow to fetch it.
_LATE: Final = timedelta(seconds=30)
#: Option of a requeued message: its earliest next delivery, by the clock of the process that requeued it.
_NOT_BEFORE: Final = "not_before"
#: Longest difference of two clocks that delays are corrected for, in milliseconds.
_MOST_SKEW_MS: Final = 3_600_000
#: Modules that call actors.
_CALLERS: Final = ("dramatiq.", "housekeeping.middleware.", "housekeeping.core.thread_interrupt")


def delay_before(retry: int, chance: Callable[[int, int], int] = random.randint) -> timedelta:
    """Return the delay before a retry, numbered from 0: about 18 s, 24 s, 50 s, 2 min, ... at most a week.

    Parameters:
      chance: Random number between two limits, so that messages that failed together are not retried together.
    """
    seconds = retry**4 + 15 + chance(0, 9) * (retry + 1)  # promise R1
    return timedelta(seconds=min(seconds, DEFAULT_MAX_BACKOFF // 1000))  # reached after the 25 retries of the default


class Retries(dramatiq.middleware.Retries):
    """Dramatiq's retries with other delays. No retry is lost.

    Dramatiq's own options keep their meaning and win: ``max_retries``, ``min_backoff``, ``max_backoff``,
    ``retry_when``, ``throws``, ``on_retry_exhausted``, ``raise dramatiq.Retry(delay=...)``.

    For an actor with a schedule no delay is longer than its period, and at most one of its messages waits for a retry.
    Another failed message is not retried, because the next tick does its work.

    For an actor with ``rediscovered=True`` no delay is longer than 10 minutes::

        @dramatiq.actor(idempotent=True, deduplicate="until_executed", rediscovered=True)
        def clean_up(project_id: int) -> None: ...  # sent every minute for each project that has something to clean

    Parameters:
      given: The application's retry middleware; its parameters win unless they are Dramatiq's defaults.
    """

    def __init__(self, client: redis.Redis, namespace: str, given: dramatiq.middleware.Retries | None = None) -> None:
        defaults = dramatiq.middleware.Retries()
        given = given or defaults
        super().__init__(
            max_retries=MAX_RETRIES if given.max_retries == defaults.max_retries else given.max_retries,
            min_backoff=given.min_backoff,
            max_backoff=given.max_backoff,
            retry_when=given.retry_when,
        )
        self._own_delays = (given.min_backoff, given.max_backoff) == (DEFAULT_MIN_BACKOFF, DEFAULT_MAX_BACKOFF)
        self._waiting = RedisLeaseStore(client, namespace, kind="retry")

    @property
    def actor_options(self) -> set[str]:
        return {*super().actor_options, "rediscovered"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        given = actor.options.get("rediscovered", False)
        if not isinstance(given, bool):
            raise InvalidOption(f"{actor.actor_name}: rediscovered is {given!r}; it should be True or False")

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        self.clear_waiting_mark(broker, message)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        if message.options.get(DEDUP_STATE) != SUPERSEDED:  # otherwise the mark belongs to its own retry
            self.clear_waiting_mark(broker, message)

    def clear_waiting_mark(self, broker: Broker, message: Message[Any] | MessageProxy) -> None:
        """Remove the mark of a waiting retry that has started or was dropped, so that another retry may wait."""
        if "retries" in message.options and self._period(broker, message) is not None:
            try:
                self._waiting.release(self._mark(broker, message), message.message_id)
            except RedisUnavailable as error:
                logger.warning("Mark of a waiting retry stays until it expires", error=str(error))

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        def enqueue(_: Message[Any] | MessageProxy, delay: int | None) -> None:
            self._enqueue(broker, message, exception, delay or 0)

        try:
            if isinstance(exception, Requeue | Shutdown):
                delay = (exception.delay or 0) if isinstance(exception, Requeue) else 0
                enqueue_reliably(broker, message, _with_clock_skew(message, delay) or None)
                return
            if exception is None:
                return
            _leave_out_callers(exception)
            stand_in: Any = ReliableBroker(broker, enqueue)
            super().after_process_message(stand_in, message, exception=exception)
        except Exception:
            # Dramatiq would log this and acknowledge the message. A dead letter can be inspected and requeued.
            message.fail()
            raise

    def _enqueue(self, broker: Broker, message: MessageProxy, exception: BaseException | None, given_ms: int) -> None:
        delay = self._delay(broker, message, exception, timedelta(milliseconds=given_ms))
        # One with dependents is retried beside another: its pipeline or group would never end.
        next_tick_does_it = self._period(broker, message) is not None and not has_dependents(message)
        if next_tick_does_it and self._another_waits(self._mark(broker, message), message.message_id, delay):
            logger.warning("Not retried, because a retry of this actor is waiting", job_status="retry_waits")
            return
        enqueue_reliably(broker, message, int(delay.total_seconds() * 1000))
        metrics.RETRIES.add(message.actor_name)

    def _delay(
        self, broker: Broker, message: MessageProxy, exception: BaseException | None, given: timedelta
    ) -> timedelta:
        """Return this library's delay unless the exception, message, actor or application sets another."""
        if isinstance(exception, Retry) and exception.delay is not None:
            return given
        actor_options = broker.get_actor(message.actor_name).options
        options = {**actor_options, **message.options}
        if not self._own_delays or "min_backoff" in options or "max_backoff" in options:
            return given
        delay = delay_before(message.options["retries"] - 1)
        limit = REDISCOVERED_DELAY if actor_options.get("rediscovered") else delay
        return min(delay, limit, self._period(broker, message) or delay)

    def _another_waits(self, mark: str, message_id: str, delay: timedelta) -> bool:
        try:
            return self._waiting.obtain(mark, message_id, delay + _LATE) != message_id
        except RedisUnavailable:
            return False  # an additional retry is better than none

    @staticmethod
    def _mark(broker: Broker, message: Message[Any] | MessageProxy) -> str:
        """Return the name of the mark of a waiting retry, made of actor and arguments. Ticks share one mark."""
        return f"{message.actor_name}:{message_digest(broker.get_actor(message.actor_name), message)}"

    @staticmethod
    def _period(broker: Broker, message: Message[Any] | MessageProxy) -> timedelta | None:
        """Return the time between the actor's ticks around now; None without a schedule."""
        options = broker.get_actor(message.actor_name).options
        cron = options.get("periodic")
        if cron is None and (spec := getattr(options.get("sweep"), "schedule", None)):
            cron = Cron(spec)  # a shard of a sweep is sent at each tick of the sweep's own actor
        return cron.period(datetime.now(UTC)) if isinstance(cron, Cron) else None


def _leave_out_callers(error: BaseException) -> None:
    """Remove the frames above the actor from the traceback, because formatting them is slow."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_CALLERS):
        frames = frames.tb_next
    if frames is not None:  # otherwise a hook failed
        error.__traceback__ = frames


def _with_clock_skew(message: MessageProxy, delay: int) -> int:
    """Return the delay in milliseconds, plus the time by which the message was delivered too early the last time.

    Dramatiq compares the due time with the clock of the process that holds the message. If that clock is ahead, the
    message is delivered at once, and would be requeued thousands of times.
    """
    if not delay:
        return 0
    now, not_before = current_millis(), message.options.get(_NOT_BEFORE)
    if isinstance(not_before, int):
        delay += min(max(0, not_before - now), _MOST_SKEW_MS)
    message.options[_NOT_BEFORE] = now + delay
    return delay
