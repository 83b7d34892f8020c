"""Which step a message's key takes when the message is enqueued: sent, delayed, due, retried or put back."""

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
from housekeeping.leases.renewal import Renewal, renewals
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
    """A delivery that a thread is at work on.

    Attributes:
      token: What tells it from other deliveries of its message; empty when it did not get so far as to ask for its key.
      retries: How many the message had used up when it began.
      answered: Whether it is known what became of its start.
    """

    message_id: str
    key: str
    token: str
    retries: int
    holds_key: bool = False
    answered: bool = False
    kept: Renewal | None = None


class ThreadState(threading.local):
    """What a thread knows of the message in its hands, from one hook to the next."""

    def __init__(self) -> None:
        self.run: Delivery | None = None
        self.steps: dict[str, KeyStep] | None = None  # to be taken with the enqueueing, by the copy's id in Redis
        self.reserved: KeyStep | None = None
        self.unconfirmed: KeyStep | None = None
        self.requeued: deque[str] = deque(maxlen=16)  # put back, retried or due; of many, the last ones
        self.awaited: frozenset[str] = frozenset()
        self.rerun: tuple[str, Delivery] | None = None  # the id of the message that comes after a run

    def after_which(self, message: Message[Any]) -> tuple[str, str]:
        """The message and run that this message comes after and whose key it takes over, if any."""
        if self.rerun is None or self.rerun[0] != message.message_id:
            return ("", "")
        return (self.rerun[1].message_id, self.rerun[1].token)

    def forget_run(self) -> None:
        """Renew its key no more."""
        run, self.run = self.run, None
        if run is not None and run.kept is not None:
            renewals.stop(run.kept)

    def run_of(self, message: Message[Any] | MessageProxy) -> Delivery | None:
        """The run, where it is this message's."""
        return self.run if self.run is not None and self.run.message_id == message.message_id else None


def refuse_duplicate(step: KeyStep, holder: str) -> None:
    """Raise `SkipEnqueue` when another message holds the key; a message that is in the queue already is sent."""
    if holder and holder != step.message_id:
        raise SkipEnqueue("deduplicated", duplicate_of=holder)


def key_of(actor: Actor[..., Any], message: Message[Any] | MessageProxy, terms: DeduplicationConfig) -> str:
    """The name of the message's key: the one that it was given; else its actor, and what its arguments say.

    Another release, whose actor has another signature, would give it another name.
    """
    given = message.options.get(KEY)
    return given if isinstance(given, str) else name_key(actor, message, terms)


def name_key(actor: Actor[..., Any], message: Message[Any] | MessageProxy, terms: DeduplicationConfig) -> str:
    """Give the message the name of its key, for as long as it lives."""
    message.options[KEY] = key = f"{actor.actor_name}:{message_digest(actor, message, terms.key)}"
    return key


def idempotency_option(message: Message[Any] | MessageProxy) -> dict[str, Any]:
    """Return the message's idempotency key as an option for another message with the same key."""
    return {name: message.options[name] for name in ("idempotency_key",) if name in message.options}


def copy_id(message: Message[Any]) -> str:
    """What a copy on its way into a queue is known by: its id in Redis; the message's on other brokers."""
    return str(message.options.get("redis_message_id", message.message_id))


def claim_of(message: Message[Any] | MessageProxy) -> str:
    """The claim by which the scheduler sent a tick's message, which tells its copies apart; empty for any other."""
    claim = message.options.get("claim")
    return claim if isinstance(claim, str) else ""


def step_of_known_message(
    key: str,
    message: Message[Any],
    terms: DeduplicationConfig,
    run: Delivery | None,
    delay: int | None,
    ttl: timedelta,
    completion: str = "",
) -> KeyStep | None:
    """Return the step for a message that the broker has had before: put back, retried, or due.

    Parameters:
      completion: The key in Redis of the message's completion.
    """
    standing = message.options.get(DEDUP_STATE)
    if run is None and standing == WHEN_DUE and delay is None:
        return claim_step(key, message, terms, ttl)
    if terms.until_executed:
        if run is None and delay is None:
            return None
        message.options[DEDUP_STATE] = CLAIMED
        put_back = run is not None and message.options.get("retries", 0) == run.retries
        retried = run is not None and not put_back and delay is not None
        return retain(
            key,
            message.message_id,
            run.token if run else "",
            ttl,
            still_again=put_back,
            tick=claim_of(message),
            ttl_after_due=terms.ttl if retried and terms.supersede_retry and not has_dependents(message) else None,
            completion=completion if retried else "",
        )
    if run is not None and delay is None:
        return claim_step(key, message, terms, ttl)
    if delay is not None and (run is not None or standing != SECOND_DELIVERY):
        message.options[DEDUP_STATE] = WHEN_DUE
        return release(key, message.message_id, "", ttl, tick=claim_of(message)) if run is None else None
    return None


def claim_step(
    key: str,
    message: Message[Any],
    terms: DeduplicationConfig,
    ttl: timedelta,
    after: tuple[str, str] = ("", ""),
    *,
    fresh: bool = False,
) -> KeyStep:
    """The step that asks for the key of a message which waits to start from now on.

    Parameters:
      after: The message id and run that are over and whose key this message takes over.
      fresh: Whether it is sent for the first time.
    """
    message.options[DEDUP_STATE] = CLAIMED
    return claim(
        key,
        message.message_id,
        ttl,
        again=terms.reschedule_once,
        never_drop=has_dependents(message),
        after=after,
        tick=claim_of(message),
        fresh=fresh,
        # A tick that is sent again takes the place of its first message, which it may make invalid.
        once=fresh and tick_of(message) is None,
        # A delayed message would do the work later than the retry.
        supersede=terms.supersede_retry and ttl == terms.ttl,
        position=message.options.get(POSITION),
    )


@contextmanager
def enqueue_without_key_on_error(message: Message[Any]) -> Iterator[None]:
    """Let a message that the broker has had before go on without its key, should that not be had.

    Where it starts the key is asked for again. An error here would lose it: Dramatiq acknowledges the
    message of a retry that it could not enqueue.
    """
    try:
        yield
    except SkipEnqueue:
        raise
    except Exception as error:
        logger.warning("Message goes on without its key", message_id=message.message_id, error=str(error))
