"""Choice of the change (`KeyStep`) of a deduplication key when a message is sent, delayed, due, retried or requeued."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dramatiq import Actor, Message, MessageProxy

from housekeeping.core.middleware_errors import SkipEnqueue
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.leases.renewal import Renewal
from housekeeping.leases.renewal_threads import renewals
from housekeeping.middleware.call_keys import message_digest
from housekeeping.middleware.deduplication.keys import KeyStep, claim, release, retain
from housekeeping.middleware.deduplication.options import (
    CLAIMED,
    DEDUP_STATE,
    KEY,
    POSITION,
    SECOND_DELIVERY,
    WHEN_DUE,
    DeduplicationConfig,
    has_dependents,
)
from housekeeping.middleware.schedule.tick_recorder import tick_of

logger = named_logger(__name__)


@dataclass(slots=True)
class Delivery:
    """A delivery of a message to a thread of this process.

    Attributes:
      token: Random token that distinguishes the deliveries of a message; empty if it ended before it claimed its key.
      retries: How many retries the message had used up when the delivery began.
      since: Reading of `elapsed` when the start was sent to Redis.
      answered: Whether Redis answered the start of the delivery.
      renewal: Renewal of its key.
    """

    message_id: str
    key: str
    token: str
    retries: int
    config: DeduplicationConfig
    since: float
    holds_key: bool = False
    answered: bool = False
    renewal: Renewal | None = None


class ThreadState(threading.local):
    """State that a thread keeps between the hooks of one message."""

    def __init__(self) -> None:
        self.delivery: Delivery | None = None
        self.asked: Delivery | None = None  # the last delivery whose start was sent to Redis
        self.steps: dict[str, KeyStep] | None = None  # collected for the enqueue path, by `copy_id`
        self.reserved: KeyStep | None = None
        self.unconfirmed: KeyStep | None = None
        self.requeued: deque[str] = deque(maxlen=16)  # ids of the last messages that were requeued, retried or due
        self.followers: frozenset[str] = frozenset()
        self.rerun: tuple[str, Delivery] | None = None  # id of the rerun's message, and the delivery before it

    def run_before(self, message: Message[Any]) -> tuple[str, str]:
        """Return the message id and run whose key this rerun takes over; empty strings if the message is no rerun."""
        if self.rerun is None or self.rerun[0] != message.message_id:
            return ("", "")
        return (self.rerun[1].message_id, self.rerun[1].token)

    def end_delivery(self) -> None:
        """Forget the delivery and stop renewing its key."""
        delivery, self.delivery = self.delivery, None
        if delivery is not None and delivery.renewal is not None:
            renewals.stop(delivery.renewal)

    def delivery_of(self, message: Message[Any] | MessageProxy) -> Delivery | None:
        """Return this thread's delivery if it delivers this message, else None."""
        mine = self.delivery is not None and self.delivery.message_id == message.message_id
        return self.delivery if mine else None


def duplicate_of(step: KeyStep, holder: str) -> SkipEnqueue | None:
    """Return the error for a message whose key another message holds; None if it holds the key itself."""
    return SkipEnqueue("deduplicated", duplicate_of=holder) if holder and holder != step.message_id else None


def key_of(actor: Actor[..., Any], message: Message[Any] | MessageProxy, config: DeduplicationConfig) -> str:
    """Return the name of the message's key, from the message or else computed from actor and arguments.

    The name in the message wins: a new release of the application may compute another one from other parameters.
    """
    given = message.options.get(KEY)
    return given if isinstance(given, str) else name_key(actor, message, config)


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
    return _text_option(message, "claim") or ""


def _text_option(message: Message[Any] | MessageProxy, name: str) -> str | None:
    """Return a message option that the scripts accept; None if it is missing or another program wrote it."""
    given = message.options.get(name)
    return given if isinstance(given, str) and "\0" not in given else None


def step_of_known_message(
    key: str,
    message: Message[Any],
    config: DeduplicationConfig,
    delivery: Delivery | None,
    delay: int | None,
    ttl: timedelta,
    completion: str = "",
) -> KeyStep | None:
    """Return the step for a message that was enqueued before and is now requeued, retried or due.

    Parameters:
      completion: The Redis key of the message's completion.
    """
    state = message.options.get(DEDUP_STATE)
    if delivery is None and state == WHEN_DUE and delay is None:
        return claim_step(key, message, config, ttl)
    if config.until_executed:
        if delivery is None and delay is None:
            return None
        message.options[DEDUP_STATE] = CLAIMED
        requeued = delivery is not None and message.options.get("retries", 0) == delivery.retries
        retried = delivery is not None and not requeued and delay is not None
        return retain(
            key,
            message.message_id,
            delivery.token if delivery else "",
            ttl,
            still_again=requeued,
            tick=claim_of(message),
            ttl_after_due=config.ttl if retried and config.supersede_retry and not has_dependents(message) else None,
            completion=completion if retried else "",
        )
    if delivery is not None and delay is None:
        return claim_step(key, message, config, ttl)
    if delay is not None and (delivery is not None or state != SECOND_DELIVERY):
        message.options[DEDUP_STATE] = WHEN_DUE
        return release(key, message.message_id, "", ttl, tick=claim_of(message)) if delivery is None else None
    return None


def claim_step(
    key: str,
    message: Message[Any],
    config: DeduplicationConfig,
    ttl: timedelta,
    after: tuple[str, str] = ("", ""),
    *,
    fresh: bool = False,
) -> KeyStep:
    """Return the step that claims the key for a new or due message.

    Parameters:
      after: Message id and token of the ended run whose key this rerun takes over.
      fresh: Whether the message is sent for the first time.
    """
    message.options[DEDUP_STATE] = CLAIMED
    return claim(
        key,
        message.message_id,
        ttl,
        again=config.reschedule_once,
        never_drop=has_dependents(message),
        after=after,
        tick=claim_of(message),
        fresh=fresh,
        # A tick's message that is sent again replaces the first one, whose claim may have expired.
        once=fresh and tick_of(message) is None,
        # A delayed message would do the work later than the retry.
        supersede=config.supersede_retry and ttl == config.ttl,
        position=_text_option(message, POSITION),
    )


@contextmanager
def enqueue_without_key_on_error(message: Message[Any]) -> Iterator[None]:
    """Let a known message be enqueued without its key if Redis is down; the key is claimed again at its start.

    Dramatiq acknowledges a message whose retry it could not enqueue. So an error here would lose the message.
    """
    try:
        yield
    except SkipEnqueue:
        raise
    except Exception as error:
        logger.warning("Message is enqueued without its key", message_id=message.message_id, error=str(error))
