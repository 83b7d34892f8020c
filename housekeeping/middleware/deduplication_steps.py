"""Which step a message's key takes when the message is enqueued: sent, delayed, due, retried or put back."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dramatiq import Actor, Message, MessageProxy

from housekeeping.foundation.renewal import Kept
from housekeeping.foundation.steering import SkipEnqueue
from housekeeping.middleware.arguments import digest
from housekeeping.middleware.deduplication_keys import Step, claim, hold_on, release
from housekeeping.middleware.deduplication_options import (
    CLAIMED,
    SECOND_DELIVERY,
    STANDING,
    WHEN_DUE,
    Terms,
    waited_for,
)
from housekeeping.middleware.tick_outcomes import tick_of


@dataclass(slots=True)
class Run:
    """A delivery that a thread is at work on.

    Attributes:
      token: What tells it from other deliveries of its message; empty when it did not get so far as to ask for its key.
      retries: How many the message had used up when it began.
    """

    message_id: str
    key: str
    token: str
    retries: int
    holds_key: bool = False
    kept: Kept | None = None


def refuse_duplicate(step: Step, holder: str) -> None:
    """Raise `SkipEnqueue` when another message holds the key; a message that is in the queue already is sent."""
    if holder and holder != step.message_id:
        raise SkipEnqueue("deduplicated", duplicate_of=holder)


def key_of(actor: Actor[..., Any], message: Message[Any] | MessageProxy, terms: Terms) -> str:
    """The name of the message's key: its actor, and what its arguments say."""
    return f"{actor.actor_name}:{digest(actor, message.args, message.kwargs, terms.key)}"


def going_on(
    key: str, message: Message[Any], terms: Terms, run: Run | None, delay: int | None, ttl: timedelta
) -> Step | None:
    """What becomes of the key of a message that the broker has had before: put back, retried, or due."""
    standing = message.options.get(STANDING)
    if run is None and standing == WHEN_DUE and delay is None:
        return claiming(key, message, terms, ttl)
    if terms.until_executed:
        if run is None and delay is None:
            return None
        message.options[STANDING] = CLAIMED
        put_back = run is not None and message.options.get("retries", 0) == run.retries
        return hold_on(key, message.message_id, run.token if run else "", ttl, still_again=put_back)
    if run is not None and delay is None:
        return claiming(key, message, terms, ttl)
    if delay is not None and (run is not None or standing != SECOND_DELIVERY):
        message.options[STANDING] = WHEN_DUE
        return release(key, message.message_id, "", ttl) if run is None else None
    return None


def claiming(
    key: str,
    message: Message[Any],
    terms: Terms,
    ttl: timedelta,
    after: tuple[str, str] = ("", ""),
    *,
    fresh: bool = False,
) -> Step:
    """The step that asks for the key of a message which waits to start from now on.

    Parameters:
      after: The message id and run that are over and whose key this message takes over.
      fresh: Whether it is sent for the first time.
    """
    message.options[STANDING] = CLAIMED
    return claim(
        key,
        message.message_id,
        ttl,
        again=terms.reschedule_once,
        never_drop=waited_for(message),
        after=after,
        fresh=fresh,
        # A tick that is sent again takes the place of its first message, which it may make invalid.
        once=fresh and tick_of(message) is None,
    )
