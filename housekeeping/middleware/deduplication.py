"""Deduplication: at most one live message for the same work.

`Deduplication` has the hooks in the life of a message. Before them, the steps choose what happens to a message's key
when the message is sent, delayed, due, retried or requeued, and when it ends. `keys` does it in Redis; at the end of a
message, `Admission` in `delivery` does it in one script with the lease and the completion.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.errors import BrokerConnectionError
from dramatiq.middleware import MiddlewareError

from housekeeping.brokers.dramatiq_internals import Requeue, Skip, SkipEnqueue, StoreUnavailable, fail_message_on_error
from housekeeping.core import telemetry
from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.redis import is_storable, milliseconds, retry_on_outage
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.leases.renewal import Renewal, renewals
from housekeeping.middleware.keys import (
    CLAIMED,
    DEDUP_STATE,
    KEY,
    POSITION,
    POSITION_REMEMBERED,
    RESERVED_FOR,
    RETRIED,
    SECOND_DELIVERY,
    WAITED_FOR,
    WHEN_DUE,
    DeduplicationConfig,
    DeduplicationKeys,
    KeyStep,
    check_options,
    config_of,
    followers_of,
    has_dependents,
    is_follower,
    key_step,
    message_digest,
    never_drop,
    tick_of,
)

logger = named_logger(__name__)

#: Redis keys and arguments, by name, of one part of the script that begins or ends a delivery.
Part = tuple[list[str], dict[str, Any] | list[str]]


@dataclass(slots=True)
class Delivery:
    """A delivery of a message to a thread of this process, with what it holds in Redis; made by `Admission`.

    Attributes:
      token: Distinguishes the deliveries of a message. It begins with the message id, so that a second delivery
        recognizes the first one.
      retries: Number of this retry; 0 for the first attempt.
      since: Reading of `elapsed` when its start was sent to Redis.
      answered: Whether Redis answered its start.
      renewals: Renewals of its running mark and its deduplication key.
      thread: The thread that received it, which creates this object. Once it has ended, nothing is renewed.
      name: Actor and message id, or the application's idempotency key instead of the id.
      marks: Redis keys of the completion, the running mark, and the number of the last enqueued retry; empty if the
        actor is not idempotent.
      ttl: For how long its completion is kept.
      sure_until: Reading of `elapsed` until which its running mark is certain to exist.
      enqueued_as: Number of the retry that was enqueued after this delivery; 0 if there is none.
      completed_by: Id of the message that has done the work.
      key: Its deduplication key; None if the message has none.
      begun: Whether its start took the deduplication key or freed it, or may have taken it.
      lease: Its lease, requested with `lease_token`; `leased` if Redis granted it.
      instead: Called in place of the actor, because another message has done the work; returns its result.
      rerun_sent: Whether the message of the rerun that follows it is in the queue.
    """

    message_id: str
    token: str
    retries: int
    since: float
    answered: bool = False
    renewals: list[Renewal] = field(default_factory=list)
    ended: bool = False
    renewing: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread = field(default_factory=threading.current_thread)
    name: str = ""
    marks: list[str] = field(default_factory=list)
    ttl: timedelta = timedelta()
    sure_until: float = 0.0
    enqueued_as: int = 0
    completed_by: str = ""
    key: str | None = None
    config: DeduplicationConfig | None = None
    begun: bool = False
    holds_key: bool = False
    lease: ExclusiveLease | None = None
    lease_token: str = ""
    leased: bool = False
    instead: Callable[[], Any] | None = None
    rerun_sent: bool = False

    def renew(self, step: Callable[[], bool]) -> bool:
        """Call the function unless the delivery has ended; False if its thread has. `end` waits while it runs."""
        with self.renewing:
            return self.ended or (self.thread.is_alive() and step())

    def end(self) -> None:
        """Stop the renewals, so that the running mark is not written again after its deletion."""
        for renewal in self.renewals:
            renewals.stop(renewal)
        with self.renewing:
            self.ended = True

    @property
    def owes_rerun(self) -> bool:
        """Whether it is followed by a rerun if it has lost its key, because a duplicate may have asked for one."""
        return self.holds_key and self.config is not None and self.config.reschedule_once


class ThreadState(threading.local):
    """State that a thread keeps between the hooks of one message."""

    def __init__(self) -> None:
        self.delivery: Delivery | None = None
        self.steps: dict[str, KeyStep] | None = None  # collected for the enqueue path, by `copy_id`
        self.reserved: KeyStep | None = None
        self.unconfirmed: KeyStep | None = None
        self.requeued: deque[str] = deque(maxlen=16)  # ids of the last messages that were requeued, retried or due
        self.followers: frozenset[str] = frozenset()
        self.rerun: tuple[str, str] = ("", "")  # id of the rerun's message, and the token of the run before it

    def end_delivery(self) -> Delivery | None:
        """Forget the delivery, stop its renewals, and return it."""
        delivery, self.delivery = self.delivery, None
        if delivery is not None:
            delivery.end()
        return delivery

    def begun_delivery(self, message: Message[Any] | MessageProxy) -> Delivery | None:
        """Return this thread's delivery if it delivers this message and has begun, else None."""
        mine = self.delivery is not None and self.delivery.message_id == message.message_id and self.delivery.begun
        return self.delivery if mine else None


def duplicate_of(step: KeyStep, holder: str) -> SkipEnqueue | None:
    """Return the error for a message whose key another message holds; None if it holds the key itself."""
    return SkipEnqueue("deduplicated", duplicate_of=holder) if holder and holder != step.message_id else None


def key_of(actor: Actor[..., Any], message: Message[Any] | MessageProxy, config: DeduplicationConfig) -> str:
    """Return the name of the message's key, from the message or else computed from actor and arguments.

    The name in the message wins: a new release of the application may compute another one from other parameters.
    """
    return text_option(message, KEY) or name_key(actor, message, config)


def name_key(actor: Actor[..., Any], message: Message[Any] | MessageProxy, config: DeduplicationConfig) -> str:
    """Compute the name of the message's key, store it in the message, and return it."""
    message.options[KEY] = key = f"{actor.actor_name}:{message_digest(actor, message, config.key)}"
    return key


def idempotency_option(message: Message[Any] | MessageProxy) -> dict[str, Any]:
    """Return the message's idempotency key as options for another message."""
    return {name: message.options[name] for name in ("idempotency_key",) if name in message.options}


def copy_id(message: Message[Any]) -> str:
    """Return the id of a message's copy in its queue: its id in Redis, or on other brokers the message id."""
    return str(message.options.get("redis_message_id", message.message_id))


def claim_of(message: Message[Any] | MessageProxy) -> str:
    """Return the token with which the scheduler claimed a message's tick; empty if no scheduler sent it."""
    return text_option(message, "claim") or ""


def text_option(message: Message[Any] | MessageProxy, name: str) -> str | None:
    """Return a message option that the scripts accept; None if it is missing or another program wrote it."""
    given = message.options.get(name)
    return given if isinstance(given, str) and is_storable(given) else None


def step_of_known_message(
    key: str,
    message: Message[Any],
    config: DeduplicationConfig,
    delivery: Delivery | None,
    delay: int | None,
    ttl: timedelta,
    sees_copies: bool,
) -> KeyStep | None:
    """Return the step for a message that was enqueued before and is now requeued, retried or due.

    Parameters:
      sees_copies: Whether the keys know the copies of their messages, because the queues are on the same Redis.
    """
    state = message.options.get(DEDUP_STATE)
    due = delivery is None and delay is None
    if due and state == WHEN_DUE:
        return claim_step(key, message, config, ttl)
    if due and not (sees_copies and state == CLAIMED):
        return None
    if due or config.until_executed:
        message.options[DEDUP_STATE] = CLAIMED
        requeued = delivery is None or message.options.get("retries", 0) == delivery.retries
        return key_step(
            "retain",
            key,
            message.message_id,
            ttl,
            run=delivery and delivery.token,
            rerun_still_wanted=requeued,
            tick=claim_of(message),
            completion=delivery.marks[0] if delivery and not requeued and delay is not None else None,
        )
    if delivery is not None and delay is None:
        return claim_step(key, message, config, ttl)
    if delay is not None and (delivery is not None or state != SECOND_DELIVERY):
        message.options[DEDUP_STATE] = WHEN_DUE
        return key_step("release", key, message.message_id, ttl, tick=claim_of(message)) if delivery is None else None
    return None


def claim_step(
    key: str,
    message: Message[Any],
    config: DeduplicationConfig,
    ttl: timedelta,
    ended_run: str = "",
    *,
    fresh: bool = False,
) -> KeyStep:
    """Return the step that claims the key for a new or due message.

    Parameters:
      ended_run: Token of the ended run whose key this rerun takes over.
      fresh: Whether the message is sent for the first time.
    """
    message.options[DEDUP_STATE] = CLAIMED
    if fresh and ttl is config.ttl and not ended_run and _SPECIAL.isdisjoint(message.options):
        return KeyStep("claim", key, message.message_id, config.claim, fresh=True, once=True)
    position = text_option(message, POSITION)
    return key_step(
        "claim",
        key,
        message.message_id,
        ttl,
        fresh=fresh,
        # A tick's message that is sent again replaces the first one, whose claim may have expired.
        once=fresh and tick_of(message) is None,
        ask_for_rerun=config.reschedule_once,
        never_drop=has_dependents(message),
        ended_run=ended_run,
        tick=claim_of(message),
        position=position,
        position_ttl=position and milliseconds(POSITION_REMEMBERED),
    )


#: Message options that change the claim of a new message.
_SPECIAL: Final = WAITED_FOR | {POSITION, "claim", "tick"}
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

    The hooks hand their `KeyStep` to `EnqueuePath`, which writes key and message together. On a broker that keeps its
    own ``enqueue``, the hooks reserve each key before and confirm it after.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self.keys = DeduplicationKeys(client, namespace)
        self.thread = ThreadState()

    @property
    def actor_options(self) -> set[str]:
        return {"deduplicate", "deduplication"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        check_options(actor)

    @contextmanager
    def collecting_steps(self) -> Iterator[dict[str, KeyStep]]:
        """Let the hooks of this thread collect their steps without executing them; yield the steps by `copy_id`."""
        before, steps = (self.thread.steps, self.thread.reserved), dict[str, KeyStep]()
        self.thread.steps, self.thread.reserved = steps, None
        try:
            yield steps
        finally:
            self.thread.steps, self.thread.reserved = before

    @contextmanager
    def reserving(self) -> Iterator[None]:
        """Let the hooks of this thread reserve the key, and release it if a middleware rejects the message."""
        before = self.thread.steps, self.thread.reserved
        self.thread.steps, self.thread.reserved = None, None
        try:
            yield
        except MiddlewareError:
            self._free_reserved()
            raise
        finally:
            self.thread.steps, self.thread.reserved = before

    def _free_reserved(self) -> None:
        reserved = self.thread.reserved
        if reserved is not None:
            try:
                self.keys.take(key_step("release", reserved.key, reserved.message_id, RESERVED_FOR))
            except RedisUnavailable as error:
                logger.warning("Key stays reserved for some seconds", key=reserved.key, error=str(error))

    def is_replacing(self, message: Message[Any]) -> bool:
        """Return whether a message replaces one that ends now: a due one, a retry, a rerun, a callback, a next step."""
        known = "redis_message_id" in message.options  # it was delivered
        return known or is_follower(message) or message.message_id in {*self.thread.followers, self.thread.rerun[0]}

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        actor = broker.actors.get(message.actor_name)
        config = config_of(actor) if actor else None
        if actor is None or config is None:
            return
        if message.message_id in self.thread.followers:
            never_drop(message)
        delivery = self.thread.begun_delivery(message)
        ttl = config.ttl + timedelta(milliseconds=delay) if delay else config.ttl
        if DEDUP_STATE in message.options or delivery is not None:
            try:
                key, sees_copies = key_of(actor, message, config), self.keys.see_copies
                step = step_of_known_message(key, message, config, delivery, delay, ttl, sees_copies)
                if step is not None:
                    self._take(step, message)
            except SkipEnqueue:
                raise
            except Exception as error:
                # Its key is claimed again at its start. An error would lose it: Dramatiq acknowledges a message whose
                # retry is not enqueued.
                logger.warning("Message is enqueued without its key", message_id=message.message_id, error=str(error))
            self.thread.requeued.append(message.message_id)
        elif delay is not None and not config.including_scheduled:
            message.options[DEDUP_STATE] = WHEN_DUE
        else:
            rerun, run = self.thread.rerun
            ended_run = run if rerun == message.message_id else ""
            key = name_key(actor, message, config)
            self._take(claim_step(key, message, config, ttl, ended_run, fresh=True), message)

    def before_delay_message(self, broker: Broker, message: MessageProxy) -> None:
        """Mark a delayed message as known, also one whose sender had no such middleware, or other actor options.

        A message that a hook refuses when it is due would keep all later ones in the queue of delayed messages.
        """
        actor = broker.actors.get(message.actor_name)
        if "idempotency_key" in message.options or (actor is not None and config_of(actor) is not None):
            message.options.setdefault(DEDUP_STATE, WHEN_DUE)

    def _take(self, step: KeyStep, message: Message[Any]) -> None:
        if self.thread.steps is not None:
            self.thread.steps[copy_id(message)] = step
            return
        with fail_message_on_error():
            duplicate = duplicate_of(step, self.keys.take(step))
        if duplicate is not None:
            raise duplicate
        if step.fresh:
            self.thread.reserved = step

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        reserved, self.thread.reserved = self.thread.reserved, None
        if reserved is not None and reserved.message_id == message.message_id:
            try:
                retry_on_outage(lambda: self.keys.confirm(reserved), tries=2, pause_s=0)
            except RedisUnavailable as error:
                self.thread.unconfirmed = reserved
                logger.warning("Key may be free before its message has ended", key=reserved.key, error=str(error))

    def prepare(self, actor: Actor[..., Any], message: MessageProxy) -> None:
        """Forget the last message of this thread."""
        self.thread.end_delivery()  # an interrupted hook may have left one
        self.thread.requeued.clear()
        self.thread.followers = followers_of(message)
        if config_of(actor) is None and "idempotency_key" in message.options:
            message.options.setdefault(DEDUP_STATE, WHEN_DUE)  # the sender's release had an idempotent actor

    def start(self, delivery: Delivery, actor: Actor[..., Any], message: MessageProxy) -> Part | None:
        """Return keys and arguments for the script that starts the message; None if it is not deduplicated."""
        config = config_of(actor)
        if config is None:
            return None
        delivery.key, delivery.config = key_of(actor, message, config), config
        # Known before Redis is asked: should the answer get lost, the message's retry keeps the key.
        delivery.begun = config.until_executed
        ttl_ms = milliseconds(config.ttl) if config.until_executed else 0
        given = {"message_id": message.message_id, "ttl": ttl_ms, "run": delivery.token, "mark": delivery.marks[1]}
        return [self.keys.prefix + delivery.key], {**given, **self.keys.copy_of(message)}

    def refusal(self, delivery: Delivery, state: str, message: MessageProxy) -> MiddlewareError | None:
        """Start to renew the key if the message got it; return the error for a message that is dropped or requeued."""
        key, config = delivery.key, delivery.config
        assert key is not None and config is not None
        # Only now where the start frees the key: should the start get lost, the end must free it.
        delivery.begun = state == "ours" or has_dependents(message)
        delivery.holds_key = state == "ours" and config.until_executed
        if delivery.holds_key:
            renew = functools.partial(self.keys.renew, key, delivery.token, config.ttl)
            delivery.renewals.append(
                renewals.start(f"key {key}", lambda: delivery.renew(renew), config.ttl, delivery.since)
            )
        if delivery.begun:
            return None
        state, _, other = state.partition(":")
        if state != "waiting":
            return Requeue(f"{message.message_id} waits for the run that holds its key", _KEY_IN_USE_DELAY)
        logger.info("Duplicate dropped", job_status="deduplicated", duplicate_of=other)
        telemetry.DEDUPLICATED.add(message.actor_name)
        return Skip("deduplicated", duplicate_of=other)

    def release_step(self, delivery: Delivery, actor: Actor[..., Any], message: MessageProxy) -> KeyStep | None:
        """Return how to release the key; None if the message was enqueued again and keeps it, or has none.

        Raises:
          UnusableArguments: The key cannot be computed.
        """
        requeued = message.message_id in self.thread.requeued
        self.thread.requeued.clear()
        config = config_of(actor)
        if config is None or requeued or message.options.get(DEDUP_STATE) == RETRIED:
            return None
        if delivery.begun and not config.until_executed:
            return None
        delivery.key = key_of(actor, message, config)
        return key_step(
            "release",
            delivery.key,
            message.message_id,
            config.ttl,
            run=delivery.token,
            started=delivery.begun and delivery.answered,
            tick=claim_of(message),
        )

    def send_rerun(self, broker: Broker, rerun: Message[Any], delivery: Delivery) -> None:
        """Enqueue the message of a requested rerun, which takes over the key; safe to repeat.

        Raises:
          RedisUnavailable: Broker or Redis did not answer.
        """
        if not delivery.rerun_sent:
            self.thread.unconfirmed = None
            self.thread.rerun = (rerun.message_id, delivery.token)
            try:
                self._send(broker, rerun, delivery)
            finally:
                self.thread.rerun = ("", "")
            delivery.rerun_sent = True
        if self.thread.unconfirmed is not None:
            # Otherwise the rerun would wait for the key of the ended run, until the key expires.
            self.keys.confirm(self.thread.unconfirmed)

    def _send(self, broker: Broker, rerun: Message[Any], delivery: Delivery) -> None:
        assert delivery.key is not None
        run = delivery.token
        free = key_step("release", delivery.key, delivery.message_id, timedelta(), run=run, even_if_rerun=True)
        try:
            sent = broker.enqueue(rerun)
        except (StoreUnavailable, BrokerConnectionError, redis.RedisError) as error:
            raise RedisUnavailable(str(error)) from error
        except BaseException:
            self.keys.take(free)
            raise
        if "duplicate_of" in sent.options:
            self.keys.take(free)
