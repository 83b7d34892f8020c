"""At most one live message for the same work: duplicates are dropped where they are sent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.errors import BrokerConnectionError
from dramatiq.middleware import MiddlewareError

from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.middleware_errors import Requeue, Skip, StoreUnavailable, fail_message_on_error
from housekeeping.core.redis_client import retry_redis
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.leases.renewal import elapsed, renewals
from housekeeping.middleware.call_keys import UnusableArguments
from housekeeping.middleware.deduplication.enqueueing import EnqueueingWithKeys, dispatch_arguments, share_redis
from housekeeping.middleware.deduplication.keys import DeduplicationKeys, KeyStep, Mark, release, text
from housekeeping.middleware.deduplication.options import (
    DEDUP_STATE,
    SECOND_DELIVERY,
    SUPERSEDED,
    WHEN_DUE,
    DeduplicationConfig,
    awaited_by,
    check_options,
    config_of,
    has_dependents,
    never_drop,
)
from housekeeping.middleware.deduplication.steps import (
    Delivery,
    ThreadState,
    claim_of,
    claim_step,
    copy_id,
    enqueue_without_key_on_error,
    idempotency_option,
    key_of,
    name_key,
    refuse_duplicate,
    step_of_known_message,
)

logger = named_logger(__name__)

_TURN: Final = timedelta(seconds=5)  # how long a message waits that finds its key in use by a running one


class Deduplication(Middleware):
    """Middleware that keeps at most one message of a key alive.

    An idempotent actor opts in to more than the default, ``until_executing``::

        @dramatiq.actor(idempotent=True, deduplicate="until_executed", deduplication={"ttl": timedelta(hours=6)})
        def sweep(project_id: int) -> None: ...

    ``until_executing``: at most one waits to start. ``until_executed``: at most one waits, runs, or waits for a
    retry. A dropped message is returned to its sender marked with ``options["duplicate_of"]``. With
    ``"if_deduplicated": "reschedule_once"`` a duplicate that arrives while the holder runs makes one more run.
    A key belongs to a message; nobody else frees or renews it.

    With ``rediscovered=True`` a new message takes the key of ``until_executed`` from one that waits for a retry. The
    old message is dropped when it comes due.

    On a Redis broker that shares its Redis with the keys, a key is taken by the script that enqueues its message;
    elsewhere it is reserved for seconds before, and confirmed after.
    """

    def __init__(
        self,
        client: redis.Redis,
        namespace: str,
        mark: Mark = lambda: None,
        completion_key: Callable[[], str] = lambda: "",
    ) -> None:
        self.keys = DeduplicationKeys(client, namespace)
        #: Enqueues messages with their keys; None where they do not share a Redis.
        self.together: EnqueueingWithKeys | None = None
        self._thread = ThreadState()
        self._mark = mark
        self._completion_key = completion_key

    @property
    def actor_options(self) -> set[str]:
        return {"deduplicate", "deduplication"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        check_options(actor)

    def work_with(self, broker: Broker) -> None:
        """Take keys by the broker's own enqueueing from now on, where that is possible; called once by `install`."""
        if isinstance(broker, RedisBroker) and share_redis(broker, self.keys):
            self.together = EnqueueingWithKeys(broker, self.keys)
            hooked: Any = broker
            hooked.do_enqueue = functools.partial(self._enqueue, hooked.do_enqueue, broker)

    @contextmanager
    def preparing(self, *, many: bool = False) -> Iterator[dict[str, KeyStep]]:
        """For as long as the block, leave the steps of keys to whoever enqueues; yields them, by the copy's id.

        Parameters:
          many: Leave them also where keys and queues do not share a Redis, to be taken for many messages at once.
        """
        before, steps = (self._thread.steps, self._thread.reserved), dict[str, KeyStep]()
        self._thread.steps, self._thread.reserved = steps if many or self.together else None, None
        try:
            yield steps
        except MiddlewareError:
            self._not_enqueued()
            raise
        finally:
            self._thread.steps, self._thread.reserved = before

    def _not_enqueued(self) -> None:
        """Free what was reserved for a message that a middleware refused before it was enqueued."""
        reserved = self._thread.reserved
        if reserved is not None:
            try:
                self.keys.release(release(reserved.key, reserved.message_id, "", reserved.ttl))
            except RedisUnavailable as error:
                logger.warning("Key stays reserved for some seconds", key=reserved.key, error=str(error))

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        actor = broker.actors.get(message.actor_name)
        terms = config_of(actor) if actor else None
        if actor is None or terms is None:
            return
        if message.message_id in self._thread.awaited:
            never_drop(message)
        run = self._thread.run_of(message)
        ttl = terms.ttl + timedelta(milliseconds=delay or 0)
        if DEDUP_STATE in message.options or run is not None:
            with enqueue_without_key_on_error(message):
                key, completion = key_of(actor, message, terms), self._completion_key()
                self._prepare(step_of_known_message(key, message, terms, run, delay, ttl, completion), message)
            self._thread.requeued.append(message.message_id)
        elif delay is not None and not terms.including_scheduled:
            message.options[DEDUP_STATE] = WHEN_DUE
        else:
            after = self._thread.after_which(message)
            self._prepare(claim_step(name_key(actor, message, terms), message, terms, ttl, after, fresh=True), message)

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        reserved, self._thread.reserved = self._thread.reserved, None
        if reserved is not None and reserved.message_id == message.message_id:
            try:
                retry_redis(lambda: self.keys.confirm(reserved), tries=2, pause_s=0)
            except RedisUnavailable as error:
                self._thread.unconfirmed = reserved
                logger.warning("Key may be free before its message has ended", key=reserved.key, error=str(error))

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        self._thread.forget_run()  # what an interrupted hook may have left
        self._thread.requeued.clear()
        self._thread.awaited = awaited_by(message)
        actor = broker.get_actor(message.actor_name)
        terms = config_of(actor)
        if terms is None:
            return
        with fail_message_on_error():
            run = Delivery(
                message.message_id, key_of(actor, message, terms), uuid4().hex, message.options.get("retries", 0)
            )
            since = elapsed()
            if terms.until_executed:
                # Known before it is asked for: should the answer get lost, the message's retry holds on to the key.
                self._thread.run = run
            ttl = terms.ttl if terms.until_executed else None
            state = self.keys.start(run.key, run.message_id, run.token, ttl, self._mark())
            # Not before, where the start frees the key: should it get lost, the end has to free it.
            self._thread.run, run.answered = run, True
            run.holds_key = state == "ours" and terms.until_executed
            if run.holds_key:
                run.kept = renewals.start(
                    f"key {run.key}", lambda: self.keys.renew(run.key, run.token, terms.ttl), terms.ttl, since
                )
        if state == "ours" or has_dependents(message):
            return
        self._thread.forget_run()
        if state == "elsewhere":
            message.options[DEDUP_STATE] = SECOND_DELIVERY
        state, _, superseded_by = state.partition(":")
        if state == "superseded":
            logger.info("Superseded retry dropped", job_status="deduplicated", duplicate_of=superseded_by)
            metrics.count_deduplicated(message.actor_name)
            raise Skip("deduplicated")
        if state == "waiting":
            logger.info("Message yields to the one that waits with its key", job_status="deduplicated")
            metrics.count_deduplicated(message.actor_name)
            raise Skip("deduplicated")
        raise Requeue(f"{message.message_id} waits for the run that holds its key", _TURN)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Free the key, however the message ended, unless it was enqueued again and holds the key on."""
        run = self._thread.run_of(message)
        self._thread.forget_run()
        requeued = message.message_id in self._thread.requeued
        self._thread.requeued.clear()
        if message.options.get(DEDUP_STATE) == SUPERSEDED:
            return
        actor = broker.get_actor(message.actor_name)
        terms = config_of(actor)
        if terms is None or requeued or (run is not None and not terms.until_executed):
            return
        try:
            key = run.key if run is not None else key_of(actor, message, terms)
            ended = run or Delivery(message.message_id, key, "", 0)
            self._end(broker, actor, message, terms, ended)
        except (RedisUnavailable, UnusableArguments) as error:
            logger.warning("Key stays until its ttl is over", error=str(error))

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self.after_process_message(broker, message)

    def _end(
        self, broker: Broker, actor: Actor[..., Any], message: MessageProxy, terms: DeduplicationConfig, run: Delivery
    ) -> None:
        """Free the key, and enqueue the one more run where it is wanted.

        Not acknowledged yet, nor recorded as completed: should the process die here, the message runs once more.
        """
        rerun: Message[Any] | None = None
        sent = False
        self._thread.unconfirmed = None

        def end() -> None:
            nonlocal rerun, sent
            if rerun is None:
                tick = claim_of(message)
                left = self.keys.release(release(run.key, run.message_id, run.token, terms.ttl, tick=tick))
                if run.token and not run.answered:
                    # Nobody heard of its start, perhaps: then the key is still that of a message that waits.
                    left = self.keys.release(release(run.key, run.message_id, "", terms.ttl, tick=tick))
                # Who lost the key cannot know whether a duplicate arrived before that: one run too many is harmless.
                if left == "free" or (left == "lost" and not (run.holds_key and terms.reschedule_once)):
                    return
                rerun = actor.message_with_options(
                    args=message.args, kwargs=message.kwargs, **idempotency_option(message)
                )
            if not sent:
                self._thread.rerun = (rerun.message_id, run)
                try:
                    self._send(broker, rerun, run, terms)
                finally:
                    self._thread.rerun = None
                sent = True
            if self._thread.unconfirmed is not None:
                # Else its message would wait for the key of the run that is over, until its ttl.
                self.keys.confirm(self._thread.unconfirmed)

        while True:
            try:
                retry_redis(end)
                return
            except RedisUnavailable as error:
                if not (run.holds_key and terms.reschedule_once):
                    raise
                # Without Redis this thread gets no other message, and a duplicate may have asked for one more run.
                logger.warning("A run cannot give back its key yet", key=run.key, error=str(error))

    def _send(self, broker: Broker, rerun: Message[Any], run: Delivery, terms: DeduplicationConfig) -> None:
        try:
            sent = broker.enqueue(rerun)
        except (StoreUnavailable, BrokerConnectionError, redis.RedisError) as error:
            raise RedisUnavailable(str(error)) from error
        except BaseException:
            self.keys.release(release(run.key, run.message_id, run.token, terms.ttl, at_once=True))
            raise
        if "duplicate_of" in sent.options:
            self.keys.release(release(run.key, run.message_id, run.token, terms.ttl, at_once=True))

    def _prepare(self, step: KeyStep | None, message: Message[Any]) -> None:
        if step is None:
            return
        if self._thread.steps is not None:
            self._thread.steps[copy_id(message)] = step
            return
        with fail_message_on_error():
            refuse_duplicate(step, self.keys.take(step))
        if step.fresh:
            self._thread.reserved = step

    def _enqueue(self, enqueue: Callable[..., Any], broker: RedisBroker, queue_name: str, *copy: Any) -> None:
        """The broker's `do_enqueue`; what becomes of the message's key is done in the same script.

        Asked again at once when the answer is lost, because that changes nothing.
        """
        assert self.together is not None
        enqueueing, step = self.together, (self._thread.steps or {}).pop(copy[0], None)
        if step is None:
            enqueue(queue_name, *copy)
            return
        dispatched = dispatch_arguments(broker, queue_name, (copy[0], copy[1]))
        try:
            holder = retry_redis(lambda: enqueueing.enqueue(step, dispatched), tries=2, pause_s=0)
        except RedisUnavailable as error:
            if step.fresh:
                raise StoreUnavailable(str(error)) from error
            raise error.__cause__ or error from None  # what Dramatiq and our patience wait for to go by
        refuse_duplicate(step, text(holder))
