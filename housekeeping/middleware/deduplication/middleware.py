"""Deduplication middleware, which drops duplicates when they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.errors import BrokerConnectionError
from dramatiq.middleware import MiddlewareError

from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.middleware_errors import Requeue, Skip, StoreUnavailable, fail_message_on_error
from housekeeping.core.redis_client import retry_redis
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.leases.renewal import elapsed, renewals
from housekeeping.middleware.call_keys import UnusableArguments
from housekeeping.middleware.deduplication.keys import DeduplicationKeys, KeyStep, RunningMark, release
from housekeeping.middleware.deduplication.options import (
    DEDUP_STATE,
    SECOND_DELIVERY,
    SUPERSEDED,
    WHEN_DUE,
    DeduplicationConfig,
    check_options,
    config_of,
    followers_of,
    has_dependents,
    never_drop,
)
from housekeeping.middleware.deduplication.steps import (
    Delivery,
    ThreadState,
    claim_of,
    claim_step,
    copy_id,
    duplicate_of,
    enqueue_without_key_on_error,
    idempotency_option,
    key_of,
    name_key,
    step_of_known_message,
)

logger = named_logger(__name__)

_KEY_IN_USE_DELAY: Final = timedelta(seconds=5)  # of a message whose key is in use by a running one


class Deduplication(Middleware):
    """Middleware that allows at most one live message per key.

    An idempotent actor opts in to more than the default, ``until_executing``::

        @dramatiq.actor(idempotent=True, deduplicate="until_executed", deduplication={"ttl": timedelta(hours=6)})
        def sweep(project_id: int) -> None: ...

    ``until_executing``: at most one waits to start. ``until_executed``: at most one waits, runs, or waits for a
    retry. A dropped message is returned to its sender marked with ``options["duplicate_of"]``. With
    ``"if_deduplicated": "reschedule_once"`` a duplicate that arrives while the holder runs causes one rerun.
    A key belongs to a message. No other message releases or renews it.

    With ``rediscovered=True`` and ``until_executed``, a new message takes the key from a message that waits for a
    retry. The old message is dropped when its retry is due.

    The hooks hand their `KeyStep` to `EnqueuePath`, which writes key and message together. On a broker that keeps its
    own ``enqueue``, the hooks reserve each key before and confirm it after.

    Parameters:
      running_mark: Returns the Redis key and content that mark this thread's delivery as running, if any.
      completion_key: Returns the Redis key that records the completion of this thread's message; empty without one.
    """

    def __init__(
        self,
        client: redis.Redis,
        namespace: str,
        running_mark: RunningMark = lambda: None,
        completion_key: Callable[[], str] = lambda: "",
    ) -> None:
        self.keys = DeduplicationKeys(client, namespace)
        self._thread = ThreadState()
        self._running_mark = running_mark
        self._completion_key = completion_key

    @property
    def actor_options(self) -> set[str]:
        return {"deduplicate", "deduplication"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        check_options(actor)

    @contextmanager
    def collecting_steps(self) -> Iterator[dict[str, KeyStep]]:
        """Let the hooks of this thread collect their steps without executing them; yield the steps by `copy_id`."""
        before, steps = (self._thread.steps, self._thread.reserved), dict[str, KeyStep]()
        self._thread.steps, self._thread.reserved = steps, None
        try:
            yield steps
        finally:
            self._thread.steps, self._thread.reserved = before

    @contextmanager
    def reserving(self) -> Iterator[None]:
        """Let the hooks of this thread reserve the key, and release it if a middleware rejects the message."""
        before = self._thread.steps, self._thread.reserved
        self._thread.steps, self._thread.reserved = None, None
        try:
            yield
        except MiddlewareError:
            self._free_reserved()
            raise
        finally:
            self._thread.steps, self._thread.reserved = before

    def _free_reserved(self) -> None:
        reserved = self._thread.reserved
        if reserved is not None:
            try:
                self.keys.release(release(reserved.key, reserved.message_id, "", reserved.ttl))
            except RedisUnavailable as error:
                logger.warning("Key stays reserved for some seconds", key=reserved.key, error=str(error))

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        actor = broker.actors.get(message.actor_name)
        config = config_of(actor) if actor else None
        if actor is None or config is None:
            return
        if message.message_id in self._thread.followers:
            never_drop(message)
        delivery = self._thread.delivery_of(message)
        ttl = config.ttl + timedelta(milliseconds=delay or 0)
        if DEDUP_STATE in message.options or delivery is not None:
            with enqueue_without_key_on_error(message):
                key, completion = key_of(actor, message, config), self._completion_key()
                step = step_of_known_message(key, message, config, delivery, delay, ttl, completion)
                if step is not None:
                    self._take(step, message)
            self._thread.requeued.append(message.message_id)
        elif delay is not None and not config.including_scheduled:
            message.options[DEDUP_STATE] = WHEN_DUE
        else:
            after = self._thread.run_before(message)
            self._take(claim_step(name_key(actor, message, config), message, config, ttl, after, fresh=True), message)

    def _take(self, step: KeyStep, message: Message[Any]) -> None:
        if self._thread.steps is not None:
            self._thread.steps[copy_id(message)] = step
            return
        with fail_message_on_error():
            duplicate = duplicate_of(step, self.keys.take(step))
        if duplicate is not None:
            raise duplicate
        if step.fresh:
            self._thread.reserved = step

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        reserved, self._thread.reserved = self._thread.reserved, None
        if reserved is not None and reserved.message_id == message.message_id:
            try:
                retry_redis(lambda: self.keys.confirm(reserved), tries=2, pause_s=0)
            except RedisUnavailable as error:
                self._thread.unconfirmed = reserved
                logger.warning("Key may be free before its message has ended", key=reserved.key, error=str(error))

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        self._thread.end_delivery()  # an interrupted hook may have left one
        self._thread.requeued.clear()
        self._thread.followers = followers_of(message)
        actor = broker.get_actor(message.actor_name)
        config = config_of(actor)
        if config is None:
            return
        with fail_message_on_error():
            key = key_of(actor, message, config)
            delivery = Delivery(message.message_id, key, uuid4().hex, message.options.get("retries", 0))
            state = self._start(delivery, config)
        if state == "ours" or has_dependents(message):
            return
        self._thread.end_delivery()
        if state == "elsewhere":
            message.options[DEDUP_STATE] = SECOND_DELIVERY
        state, _, superseded_by = state.partition(":")
        if state == "superseded":
            logger.info("Superseded retry dropped", job_status="deduplicated", duplicate_of=superseded_by)
        elif state == "waiting":
            logger.info("Duplicate dropped", job_status="deduplicated")
        else:
            raise Requeue(f"{message.message_id} waits for the run that holds its key", _KEY_IN_USE_DELAY)
        metrics.count_deduplicated(message.actor_name)
        raise Skip("deduplicated")

    def _start(self, delivery: Delivery, config: DeduplicationConfig) -> str:
        """Start a delivery; return the result of `DeduplicationKeys.start`."""
        since = elapsed()
        if config.until_executed:
            # Remembered before Redis is asked: should the answer get lost, the message's retry keeps the key.
            self._thread.delivery = delivery
        ttl = config.ttl if config.until_executed else None
        state = self.keys.start(delivery.key, delivery.message_id, delivery.token, ttl, self._running_mark())
        # Remembered only now where the start frees the key: should the start get lost, the end must free it.
        self._thread.delivery, delivery.answered = delivery, True
        delivery.holds_key = state == "ours" and config.until_executed
        if delivery.holds_key:
            delivery.renewal = renewals.start(
                f"key {delivery.key}",
                lambda: self.keys.renew(delivery.key, delivery.token, config.ttl),
                config.ttl,
                since,
            )
        return state

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Release the key, unless the message was enqueued again and keeps it."""
        delivery = self._thread.delivery_of(message)
        self._thread.end_delivery()
        requeued = message.message_id in self._thread.requeued
        self._thread.requeued.clear()
        if message.options.get(DEDUP_STATE) == SUPERSEDED:
            return
        actor = broker.get_actor(message.actor_name)
        config = config_of(actor)
        if config is None or requeued or (delivery is not None and not config.until_executed):
            return
        try:
            ended = delivery or Delivery(message.message_id, key_of(actor, message, config), "", 0)
            self._end(broker, actor, message, config, ended)
        except (RedisUnavailable, UnusableArguments) as error:
            logger.warning("Key stays until its ttl is over", error=str(error))

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self.after_process_message(broker, message)

    def _end(
        self,
        broker: Broker,
        actor: Actor[..., Any],
        message: MessageProxy,
        config: DeduplicationConfig,
        delivery: Delivery,
    ) -> None:
        """Release the key, and enqueue a rerun if one was requested.

        The message is not yet acknowledged or recorded as completed. If the process dies here, it runs again.
        """
        rerun: Message[Any] | None = None
        sent = False
        self._thread.unconfirmed = None

        def end() -> None:
            nonlocal rerun, sent
            if rerun is None:
                if not self._rerun_wanted(message, config, delivery):
                    return
                rerun = actor.message_with_options(
                    args=message.args, kwargs=message.kwargs, **idempotency_option(message)
                )
            if not sent:
                self._thread.rerun = (rerun.message_id, delivery)
                try:
                    self._send(broker, rerun, delivery, config)
                finally:
                    self._thread.rerun = None
                sent = True
            if self._thread.unconfirmed is not None:
                # Otherwise the rerun would wait for the key of the ended run, until the key expires.
                self.keys.confirm(self._thread.unconfirmed)

        while True:
            try:
                retry_redis(end)
                return
            except RedisUnavailable as error:
                if not (delivery.holds_key and config.reschedule_once):
                    raise
                # Without Redis this thread gets no other message, and a duplicate may have asked for a rerun.
                logger.warning("Key could not be released, tried again", key=delivery.key, error=str(error))

    def _rerun_wanted(self, message: MessageProxy, config: DeduplicationConfig, delivery: Delivery) -> bool:
        """Release the key, or keep it for a requested rerun; return whether one was requested."""
        tick = claim_of(message)
        left = self.keys.release(release(delivery.key, delivery.message_id, delivery.token, config.ttl, tick=tick))
        if delivery.token and not delivery.answered:
            # The start may not have happened. Then the key is still that of a waiting message.
            left = self.keys.release(release(delivery.key, delivery.message_id, "", config.ttl, tick=tick))
        # A run that lost its key cannot know whether a duplicate arrived before. One run too many is harmless.
        return left == "again" or (left == "lost" and delivery.holds_key and config.reschedule_once)

    def _send(self, broker: Broker, rerun: Message[Any], delivery: Delivery, config: DeduplicationConfig) -> None:
        free = release(delivery.key, delivery.message_id, delivery.token, config.ttl, at_once=True)
        try:
            sent = broker.enqueue(rerun)
        except (StoreUnavailable, BrokerConnectionError, redis.RedisError) as error:
            raise RedisUnavailable(str(error)) from error
        except BaseException:
            self.keys.release(free)
            raise
        if "duplicate_of" in sent.options:
            self.keys.release(free)
