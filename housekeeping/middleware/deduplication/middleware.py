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
from housekeeping.core.redis.client import milliseconds, retry_redis
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.leases.renewal import elapsed
from housekeeping.leases.renewal_threads import renewals
from housekeeping.middleware.deduplication.ending import Ending
from housekeeping.middleware.deduplication.keys import DROP_REMEMBERED, DeduplicationKeys, KeyStep, release
from housekeeping.middleware.deduplication.options import (
    DEDUP_STATE,
    SUPERSEDED,
    WHEN_DUE,
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
      idempotency_keys: Returns the Redis keys of the completion and of the running mark of this thread's message; empty
        without a message.
    """

    def __init__(
        self,
        client: redis.Redis,
        namespace: str,
        idempotency_keys: Callable[[], tuple[str, str]] = lambda: ("", ""),
    ) -> None:
        self.keys = DeduplicationKeys(client, namespace)
        self._thread = ThreadState()
        self._idempotency_keys = idempotency_keys

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
                key, completion = key_of(actor, message, config), self._idempotency_keys()[0]
                step = step_of_known_message(key, message, config, delivery, delay, ttl, completion)
                if step is not None:
                    self._take(step, message)
            self._thread.requeued.append(message.message_id)
        elif delay is not None and not config.including_scheduled:
            message.options[DEDUP_STATE] = WHEN_DUE
        else:
            after = self._thread.run_before(message)
            self._take(claim_step(name_key(actor, message, config), message, config, ttl, after, fresh=True), message)

    def before_delay_message(self, broker: Broker, message: MessageProxy) -> None:
        """Mark a delayed message as known, also one whose sender had no such middleware, or other actor options.

        A message that a hook refuses when it is due would keep all later ones in the queue of delayed messages.
        """
        actor = broker.actors.get(message.actor_name)
        if "idempotency_key" in message.options or (actor is not None and config_of(actor) is not None):
            message.options.setdefault(DEDUP_STATE, WHEN_DUE)

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

    def prepare(self, actor: Actor[..., Any], message: MessageProxy) -> tuple[list[str], list[Any]] | None:
        """Return keys and arguments for the script that starts the message; None if it is not deduplicated."""
        thread = self._thread
        thread.end_delivery()  # an interrupted hook may have left one
        thread.requeued.clear()
        thread.followers = followers_of(message)
        config = config_of(actor)
        if config is None:
            if "idempotency_key" in message.options:  # the sender's release had an idempotent actor
                message.options.setdefault(DEDUP_STATE, WHEN_DUE)
            return None
        key = key_of(actor, message, config)
        delivery = Delivery(message.message_id, key, uuid4().hex, message.options.get("retries", 0), config, elapsed())
        thread.asked = delivery
        if config.until_executed:
            # Remembered before Redis is asked: should the answer get lost, the message's retry keeps the key.
            thread.delivery = delivery
        ttl_ms = milliseconds(config.ttl) if config.until_executed else 0
        ours = [message.message_id, ttl_ms, delivery.token, milliseconds(DROP_REMEMBERED)]
        return [self.keys.prefix + key], [*ours, *self.keys.copy_of(message), self._idempotency_keys()[1]]

    def refusal(self, state: str, message: MessageProxy) -> MiddlewareError | None:
        """Start to renew the key if the message got it; return the error for a message that is dropped or requeued."""
        delivery = self._thread.asked
        assert delivery is not None
        config = delivery.config
        # Remembered only now where the start frees the key: should the start get lost, the end must free it.
        self._thread.delivery, delivery.answered = delivery, True
        delivery.holds_key = state == "ours" and config.until_executed
        if delivery.holds_key:
            delivery.renewal = renewals.start(
                f"key {delivery.key}",
                lambda: self.keys.renew(delivery.key, delivery.token, config.ttl),
                config.ttl,
                delivery.since,
            )
        if state == "ours" or has_dependents(message):
            return None
        self._thread.end_delivery()
        state, _, superseded_by = state.partition(":")
        if state == "superseded":
            logger.info("Superseded retry dropped", job_status="deduplicated", duplicate_of=superseded_by)
        elif state == "waiting":
            logger.info("Duplicate dropped", job_status="deduplicated")
        else:
            return Requeue(f"{message.message_id} waits for the run that holds its key", _KEY_IN_USE_DELAY)
        metrics.DEDUPLICATED.add(message.actor_name)
        return Skip("deduplicated")

    def forget(self) -> None:
        """Forget the delivery that was prepared, because the message does not start."""
        self._thread.end_delivery()

    def end(self, actor: Actor[..., Any], message: MessageProxy) -> Ending | None:
        """Return how to release the key; None if the message was enqueued again and keeps it, or has none.

        Raises:
          UnusableArguments: The key cannot be computed.
        """
        delivery = self._thread.delivery_of(message)
        self._thread.end_delivery()
        requeued = message.message_id in self._thread.requeued
        self._thread.requeued.clear()
        config = config_of(actor)
        if config is None or requeued or (delivery is not None and not config.until_executed):
            return None
        if message.options.get(DEDUP_STATE) == SUPERSEDED:
            return None
        if delivery is None:
            delivery = Delivery(message.message_id, key_of(actor, message, config), "", 0, config, 0.0)
        return Ending(delivery, self.keys.prefix, claim_of(message))

    def send_rerun(self, broker: Broker, rerun: Message[Any], ending: Ending) -> None:
        """Enqueue the message of a requested rerun, which takes over the key; safe to repeat.

        Raises:
          RedisUnavailable: Broker or Redis did not answer.
        """
        if ending.sent is not rerun:
            self._thread.unconfirmed = None
            self._thread.rerun = (rerun.message_id, ending.delivery)
            try:
                self._send(broker, rerun, ending.delivery)
            finally:
                self._thread.rerun = None
            ending.sent = rerun
        if self._thread.unconfirmed is not None:
            # Otherwise the rerun would wait for the key of the ended run, until the key expires.
            self.keys.confirm(self._thread.unconfirmed)

    def _send(self, broker: Broker, rerun: Message[Any], delivery: Delivery) -> None:
        free = release(delivery.key, delivery.message_id, delivery.token, delivery.config.ttl, at_once=True)
        try:
            sent = broker.enqueue(rerun)
        except (StoreUnavailable, BrokerConnectionError, redis.RedisError) as error:
            raise RedisUnavailable(str(error)) from error
        except BaseException:
            self.keys.release(free)
            raise
        if "duplicate_of" in sent.options:
            self.keys.release(free)
