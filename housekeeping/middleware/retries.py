"""Retries with growing delays, and what must not be lost around them.

No retry is lost, and retries of a scheduled actor do not accumulate. Dead letters contain their last error, and a
scheduled actor keeps only its last ten. Callbacks of groups count each message once. Messages that must not be lost
wait for an unreachable broker.

The result of a dropped message is that of the message that runs instead. It is stored as the exception
`DroppedAsDuplicateOf`, whose text is the id of the other message. So it needs nothing that a result backend does not
have, and a process without this library gets the id in a ``ResultFailure``. Where the library is installed, the backend
continues with the other message.
"""

from __future__ import annotations

import functools
import logging
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import dramatiq.middleware
import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis, q_name
from dramatiq.errors import BrokerConnectionError, Retry
from dramatiq.middleware import Interrupt, Shutdown
from dramatiq.middleware.retries import DEFAULT_MAX_BACKOFF, DEFAULT_MIN_BACKOFF
from dramatiq.rate_limits.backends import RedisBackend
from dramatiq.results import ResultFailure, ResultMissing, Results, ResultTimeout
from dramatiq.results.backend import DEFAULT_TIMEOUT

from housekeeping.brokers.dramatiq_internals import (
    InvalidOption,
    Requeue,
    Skip,
    SkipDelivery,
    StoreUnavailable,
    exception_of,
    store_exceptions,
    wrong_option,
)
from housekeeping.core import telemetry
from housekeeping.core.cron import Cron
from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.logs import error_line, leave_out_callers
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.redis import is_rejection, milliseconds, read_scripts, register_freeing_script, retry_on_outage
from housekeeping.leases.renewal import RedisLeaseStore
from housekeeping.middleware.keys import DEDUP_STATE, DEFAULT_TTL, RETRIED, has_dependents, message_digest, never_drop

KEPT: Final = 10  # dead letters of a scheduled actor; promise R1
_MAX_FRAMES: Final = 30  # of a traceback, as many as Dramatiq keeps for a retry

#: The scripts of the file beside this module, by name.
_LUA: Final = read_scripts(__file__)
_KEEP_THE_LAST: Final = _LUA["keep_the_last"]
_REWRITE: Final = _LUA["rewrite"]


class _ThreadState(threading.local):
    #: The id of the running message, and the number of its retries and its traceback when it started.
    attempt: tuple[str, int | None, str | None] = ("", None, None)


class DeadLetters(Middleware):
    """Middleware that completes dead letters and limits their number.

    A dead letter contains the error of its last attempt and the number of retries that were made. Dramatiq's own dead
    letters contain the error of the attempt before, and count one retry more. The last 10 of each scheduled actor are
    kept, because they are all the same work. Those of other actors stay as long as the broker keeps them.

    Note: On RabbitMQ all are kept as long as the broker keeps them, because it cannot remove a single dead letter.
    """

    def __init__(self) -> None:
        self._thread = _ThreadState()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        options = message.options
        self._thread.attempt = (message.message_id, options.get("retries"), options.get("traceback"))

    def before_nack(self, broker: Broker, message: MessageProxy) -> None:
        message_id, retries, before = self._thread.attempt
        if message_id == message.message_id and "retries" in message.options:
            message.options["retries"] = retries or 0
        error = exception_of(message)
        if error is None:
            return
        written = message.options.get("traceback")
        # Formatting a traceback is slow, so one that Dramatiq's retries have written for this error is kept.
        if not written or written == before or not written.endswith(traceback.format_exception_only(error)[-1]):
            message.options["traceback"] = "".join(traceback.format_exception(error, limit=_MAX_FRAMES))
        redis_id = message.options.get("redis_message_id")
        if isinstance(broker, RedisBroker) and redis_id and not hasattr(broker, "rewrites_dead_letters"):
            rewrite: Any = broker.client.register_script(_REWRITE)
            rewrite(keys=[f"{broker.namespace}:{message.queue_name}.msgs"], args=[redis_id, message.encode()])

    def after_nack(self, broker: Broker, message: MessageProxy) -> None:
        telemetry.DEAD_LETTERS.add(message.actor_name)
        actor = broker.actors.get(message.actor_name)
        if not isinstance(broker, RedisBroker) or actor is None:
            return
        if "periodic" not in actor.options:
            return
        dead = f"{broker.namespace}:{q_name(message.queue_name)}.XQ"
        keep_the_last: Any = broker.client.register_script(_KEEP_THE_LAST)
        keep_the_last(
            keys=[f"{broker.namespace}:__dead__.{actor.actor_name}", dead, f"{dead}.msgs"],
            args=[message.options["redis_message_id"], KEPT, broker.dead_message_ttl],
        )


logger = named_logger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Middleware)

_PAUSE_S: Final = 1.0  # before a step is repeated, while Redis or RabbitMQ does not answer
#: Errors raised while Redis or RabbitMQ is down. OSError: the host name cannot be resolved.
_AWAY: Final = (redis.RedisError, BrokerConnectionError, StoreUnavailable, RedisUnavailable, OSError)


def retry_until_available(step: Callable[[], T], event: str) -> T:
    """Repeat a step until the broker answers; the step must be safe to repeat.

    Dramatiq swallows an error in a hook after the actor and acknowledges the message, which is then lost. Waiting
    costs nothing, because without its broker this thread gets no other message. If the process ends meanwhile, the
    message is not acknowledged, and the broker delivers it again.

    Parameters:
      event: The log event for each failed attempt.

    Raises:
      redis.RedisError, RedisUnavailable, StoreUnavailable: Redis rejects the step, so that waiting does not help.
    """
    while True:
        try:
            return step()
        except _AWAY as error:
            if is_rejection(error):
                raise
            _wait(event, error_line(error))
        except Interrupt:
            # The interrupt was meant for the actor, which has ended. If it arrived after the step, the step is
            # repeated: a second message is better than none, and an idempotent actor executes its message once.
            continue


def enqueue_reliably(broker: Broker, message: Message[Any] | MessageProxy, delay: int | None = None) -> None:
    """Enqueue a message, trying again until the broker answers."""
    # The same message each time: a new one would count as a duplicate of the first attempt's.
    retry_until_available(lambda: broker.enqueue(message, delay=delay), "Message cannot be enqueued yet; retrying")  # type: ignore[arg-type]


def _wait(event: str, reason: str) -> None:
    try:
        logger.warning(event, error=reason)
        time.sleep(_PAUSE_S)
    except Interrupt:
        return


class ReliableBroker:
    """Stand-in for a broker in Dramatiq's hooks, whose ``enqueue`` and ``send`` wait for the broker to answer.

    Parameters:
      enqueue: Called in place of the broker's ``enqueue``.
    """

    def __init__(
        self, broker: Broker, enqueue: Callable[[Message[Any] | MessageProxy, int | None], None] | None = None
    ) -> None:
        self._broker = broker
        self._enqueue = enqueue or functools.partial(enqueue_reliably, broker)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def get_actor(self, name: str) -> _ReliableActor:
        """Return a stand-in for the actor; its ``send`` waits for the broker as well."""
        return _ReliableActor(self._broker, self._broker.get_actor(name))

    def enqueue(self, message: Message[Any] | MessageProxy, *, delay: int | None = None) -> None:
        """Enqueue a message, trying again until the broker answers."""
        self._enqueue(message, delay)


class _ReliableActor:
    def __init__(self, broker: Broker, actor: Actor[..., Any]) -> None:
        self._broker = broker
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def send(self, *args: Any, **kwargs: Any) -> None:
        message = self._actor.message(*args, **kwargs)
        never_drop(message)  # a callback, which others depend on; promise D2
        enqueue_reliably(self._broker, message)


def waiting_for_broker(middleware: M) -> M:
    """Make the ``after_process_message`` hook of a middleware wait for the broker when it sends messages.

    Works for Dramatiq's middleware and an application's own. The hook is not called for a message that goes back to the
    queue, because it has not ended. If the hook fails, for example because a result cannot be encoded, the message
    becomes a dead letter.
    """
    hook: Callable[..., None] = middleware.after_process_message

    @functools.wraps(hook)
    def run_hook(
        broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        if isinstance(exception, Requeue | Shutdown):
            return
        try:
            hook(ReliableBroker(broker), message, result=result, exception=exception)
        except Exception as error:
            if exception is None:
                message.fail()  # Dramatiq would acknowledge it. A message that failed before has its retry already.
                message.stuff_exception(error)  # for the dead letter
            raise

    middleware.after_process_message = run_hook  # type: ignore[method-assign]
    return middleware


_COUNT: Final = _LUA["count"]


def reliable_groups(given: dramatiq.middleware.GroupCallbacks) -> dramatiq.middleware.GroupCallbacks:
    """Make the application's group callbacks lose nothing, and on Redis count no message twice."""
    backend = given.rate_limiter_backend
    if type(given) is dramatiq.middleware.GroupCallbacks and isinstance(backend, RedisBackend):
        given = GroupCallbacks(given, backend)
    return waiting_for_broker(given)


class GroupCallbacks(dramatiq.middleware.GroupCallbacks):
    """Group callbacks that count each message of a group exactly once.

    Dramatiq's class skips a message that ends while Redis is down. The group then never ends. It also counts a
    redelivered message twice. The group then ends too early.

    Parameters:
      given: The application's middleware, whose TTL is kept.
      backend: Its Redis backend.
    """

    def __init__(self, given: dramatiq.middleware.GroupCallbacks, backend: RedisBackend) -> None:
        # Not by super().__init__, which would warn a second time about Dramatiq's environment variable.
        self.rate_limiter_backend = given.rate_limiter_backend
        self.barrier_ttl = given.barrier_ttl
        self._count: Any = register_freeing_script(backend.client, _COUNT)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        group = message.options.get("group_completion_uuid")
        callbacks = message.options.get("group_completion_callbacks")
        if exception is not None or message.failed or not (group and callbacks):
            return
        if retry_until_available(
            lambda: self._is_last(group, message.message_id), "Group member cannot be counted yet; retrying"
        ):
            for callback in callbacks:
                broker.enqueue(Message(**callback))

    def _is_last(self, group: str, message_id: str) -> bool:
        # The braces put the second key into the first one's cluster slot. A script's keys must be in one slot.
        return bool(self._count(keys=[group, f"{{{group}}}@counted"], args=[message_id, self.barrier_ttl]))


#: A dropped message and the id of the message that runs instead.
Dropped = tuple[Message[Any] | MessageProxy, str]


class DroppedAsDuplicateOf(Exception):
    """Stored in place of a dropped message's result; its text is the id of the message that runs instead."""


class ResultGone(Exception):
    """Stored in place of the result of a message whose work another one had done before, without a result left."""


def stand_in_results(results: Results, has_completed: Callable[[Message[Any]], bool]) -> Results:
    """Let dropped messages have the result of the message that runs instead, or that has run.

    Dramatiq stores None as the result of a skipped message. It would replace the result of a message that is delivered
    again, or answer those who wait for a retry.

    Parameters:
      has_completed: Returns whether a message has run and will store no result anymore.
    """
    hook = results.after_skip_message

    @functools.wraps(hook)
    def run_hook(broker: Broker, message: MessageProxy) -> None:
        # Dramatiq calls this hook while it handles the SkipMessage, and does not pass it on.
        skip = sys.exception()
        if isinstance(skip, SkipDelivery):
            if skip.duplicate_of is not None:
                _copy(results, broker, message, skip.duplicate_of)
        elif isinstance(skip, Skip) and skip.duplicate_of is not None:
            note_duplicates(broker, [(message, skip.duplicate_of)])
        else:
            hook(broker, message)

    results.after_skip_message = run_hook  # type: ignore[method-assign]
    backend: Any = results.backend
    backend.get_result = functools.partial(_result, backend.get_result, has_completed)
    # A message whose result was not stored would be done without one. Storing it again replaces it.
    for name in ("after_process_message", "after_nack"):
        setattr(results, name, functools.partial(_repeated, getattr(results, name)))
    return results


def _repeated(hook: Callable[..., None], *args: Any, **outcome: Any) -> None:
    retry_on_outage(lambda: hook(*args, **outcome))


def note_duplicates(broker: Broker, dropped: Sequence[Dropped]) -> None:
    """Let the results of dropped messages be those of the messages that run instead; never raises."""
    for results in broker.middleware:
        if not isinstance(results, Results):
            continue
        by_ttl: dict[int, list[tuple[Message[Any] | MessageProxy, Exception]]] = {}
        for message, other in dropped:
            options = _options(broker, message)
            if (ttl := _ttl(results, options)) is not None:
                # The other message may wait for as long as an unused key lives.
                waits: timedelta = (options.get("deduplication") or {}).get("ttl", DEFAULT_TTL)
                by_ttl.setdefault(ttl + milliseconds(waits), []).append((message, DroppedAsDuplicateOf(other)))
        for ttl, entries in by_ttl.items():
            try:
                store_exceptions(results.backend, entries, ttl)
            except Exception as error:
                logger.warning("Results of duplicates will be missing", error=error_line(error), count=len(entries))


def _options(broker: Broker, message: Message[Any] | MessageProxy) -> dict[str, Any]:
    actor = broker.actors.get(message.actor_name)
    return {**(actor.options if actor else {}), **message.options}


def _ttl(results: Results, options: dict[str, Any]) -> int | None:
    """Return for how many milliseconds a result is kept; None if it is not stored."""
    ttl: int = options.get("result_ttl", results.result_ttl)
    return ttl if options.get("store_results", results.store_results) else None


def result_of(broker: Broker, message: MessageProxy, other: str) -> Any:
    """Return the result of another message of the same actor.

    Raises:
      ResultMissing: It has none, or it is gone.
    """
    for results in broker.middleware:
        if isinstance(results, Results):
            try:
                return results.backend.get_result(_with_id(message, other))
            except ResultFailure:
                break
    raise ResultMissing(message)


def _copy(results: Results, broker: Broker, message: MessageProxy, other: str) -> None:
    """Store the result of a completed message as that of another one."""
    ttl = _ttl(results, _options(broker, message))
    if ttl is None:
        return
    try:
        result = result_of(broker, message, other)
    except ResultMissing:
        gone = ResultGone(f"message {other} did the work before, and its result is gone or was not stored")
        results.backend.store_exception(message, gone, ttl)
        return
    results.backend.store_result(message, result, ttl)


def _result(
    get: Callable[..., Any],
    has_completed: Callable[[Message[Any]], bool],
    message: Message[Any],
    *,
    block: bool = False,
    timeout: int | None = None,
) -> Any:
    """Return the result of a message, or of the one that runs instead of it; raises as the backend's own method."""
    ends_at = time.monotonic() + (DEFAULT_TIMEOUT if timeout is None else timeout) / 1000
    try:
        return get(message, block=block, timeout=timeout)
    except ResultFailure as failure:
        if failure.orig_exc_type != DroppedAsDuplicateOf.__name__:
            raise
        other = _with_id(message, failure.orig_exc_msg)
    left = max(0, int((ends_at - time.monotonic()) * 1000))
    block = block and not _is_completed(other, has_completed)
    try:
        return _result(get, has_completed, other, block=block, timeout=left)
    except (ResultMissing, ResultTimeout):
        if not _is_completed(other, has_completed):
            raise
    text = f"message {message.message_id} was dropped, because it equals {other.message_id}, whose result is gone"
    raise ResultFailure(text, ResultGone.__name__, text)


def _is_completed(message: Message[Any], has_completed: Callable[[Message[Any]], bool]) -> bool:
    try:
        return has_completed(message)
    except RedisUnavailable:
        return False


def _with_id(message: Message[Any] | MessageProxy, message_id: str) -> Message[Any]:
    copied: Message[Any] = message.copy(message_id=message_id)
    return copied


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
        # Dramatiq logs its own delay, even if no retry follows.
        self.logger = logging.getLogger(f"{__name__}.Retries")
        self.logger.addFilter(_tells_no_delay)
        self._own_delays = (given.min_backoff, given.max_backoff) == (DEFAULT_MIN_BACKOFF, DEFAULT_MAX_BACKOFF)
        self._waiting = RedisLeaseStore(client, namespace, kind="retry")

    @property
    def actor_options(self) -> set[str]:
        return {*super().actor_options, "rediscovered"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        given = actor.options.get("rediscovered", False)
        if not isinstance(given, bool):
            raise InvalidOption(f"{actor.actor_name}: rediscovered is {given!r}; it should be True or False")
        if wrong := wrong_option(actor.options):
            name, right = wrong
            raise InvalidOption(f"{actor.actor_name}: {name} is {actor.options[name]!r}; it should be {right}")

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        self.clear_waiting_mark(broker, message)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        if message.options.get(DEDUP_STATE) != RETRIED:  # otherwise the mark belongs to its own retry
            self.clear_waiting_mark(broker, message)

    def clear_waiting_mark(self, broker: Broker, message: Message[Any] | MessageProxy) -> None:
        """Remove the mark of a waiting retry that has started or was dropped, so that another retry may wait."""
        if "retries" in message.options and _period(broker, message) is not None:
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
            leave_out_callers(exception)
            stand_in: Any = ReliableBroker(broker, enqueue)
            super().after_process_message(stand_in, message, exception=exception)
        except Exception:
            # Dramatiq would log this and acknowledge the message. A dead letter can be inspected and requeued.
            message.fail()
            raise

    def _enqueue(self, broker: Broker, message: MessageProxy, exception: BaseException | None, given_ms: int) -> None:
        delay = timedelta(milliseconds=max(given_ms, 0))
        if self._own_delays:
            delay = _delay(broker, message, exception, delay)
        # One with dependents is retried beside another: its pipeline or group would never end.
        next_tick_does_it = _period(broker, message) is not None and not has_dependents(message)
        if next_tick_does_it and self._another_waits(self._mark(broker, message), message.message_id, delay):
            logger.warning("Not retried, because a retry of this actor is waiting", job_status="retry_waits")
            return
        enqueue_reliably(broker, message, int(delay.total_seconds() * 1000))
        logger.info(
            "Message will be retried", delay_s=round(delay.total_seconds(), 3), retries=message.options["retries"]
        )
        telemetry.RETRIES.add(message.actor_name)

    def _another_waits(self, mark: str, message_id: str, delay: timedelta) -> bool:
        try:
            return self._waiting.obtain(mark, message_id, delay + _LATE) != message_id
        except RedisUnavailable:
            return False  # an additional retry is better than none

    @staticmethod
    def _mark(broker: Broker, message: Message[Any] | MessageProxy) -> str:
        """Return the name of the mark of a waiting retry, made of actor and arguments. Ticks share one mark."""
        return f"{message.actor_name}:{message_digest(broker.get_actor(message.actor_name), message)}"


def _tells_no_delay(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Retrying message")


def next_delay(options: Mapping[str, Any], retries: int, exception: BaseException) -> timedelta | None:
    """Return the delay before the next attempt of a message without a broker, as `Retries`; None if there is none.

    Parameters:
      options: Those of its actor. ``on_retry_exhausted`` has no effect, because there is no queue.
      retries: Number of retries so far.
    """
    actor = SimpleNamespace(options={**options, "on_retry_exhausted": None})
    delays: list[timedelta] = []

    def enqueue(message: MessageProxy, delay: int) -> None:
        delays.append(_delay(broker, message, exception, timedelta(milliseconds=delay)))

    broker: Any = SimpleNamespace(get_actor=lambda _: actor, enqueue=enqueue)
    message = MessageProxy(Message("", "", (), {}, {"retries": retries}))
    dramatiq.middleware.Retries(max_retries=MAX_RETRIES).after_process_message(broker, message, exception=exception)
    return next(iter(delays), None)


def _delay(broker: Broker, message: MessageProxy, exception: BaseException | None, given: timedelta) -> timedelta:
    """Return this library's delay unless the exception, message or actor sets another."""
    if isinstance(exception, Retry) and exception.delay is not None:
        return given
    actor_options = broker.get_actor(message.actor_name).options
    options = {**actor_options, **message.options}
    if "min_backoff" in options or "max_backoff" in options:
        return given
    delay = delay_before(message.options["retries"] - 1)
    limit = REDISCOVERED_DELAY if actor_options.get("rediscovered") else delay
    return min(delay, limit, _period(broker, message) or delay)


def _period(broker: Broker, message: Message[Any] | MessageProxy) -> timedelta | None:
    """Return the time between the actor's ticks around now; None without a schedule."""
    cron = broker.get_actor(message.actor_name).options.get("periodic")
    return cron.period(datetime.now(UTC)) if isinstance(cron, Cron) else None


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
