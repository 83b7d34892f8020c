"""Who holds which key of deduplication, in Redis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

import redis
from redis.client import Pipeline

from housekeeping.core.redis_client import translate_redis_errors
from housekeeping.middleware.deduplication import scripts as scripts
from housekeeping.middleware.deduplication.options import POSITION_REMEMBERED

#: Part of every key: raised when the form of keys changes, so that old and new do not meet by accident.
KEY_VERSION: Final = "v1"
#: A key whose message never reached the queue (the process died in between) blocks nothing for longer. Where keys
#: and queue share a Redis there is no in between.
RESERVED_FOR: Final = timedelta(seconds=5)

#: Only a retry that is due later than this is superseded; one that is due before the next run of a scheduler that runs
#: every minute (workers.md, 58) does the work soon enough.
SUPERSEDED_BEFORE_DUE: Final = timedelta(minutes=1)
#: How long a superseded message is remembered once dropped. Longer than the broker's heartbeat timeout (60 s), after
#: which it is delivered again if its worker was killed before the acknowledgement.
_DROP_REMEMBERED: Final = timedelta(minutes=5)

#: Says what `DeduplicationKeys.start` is to be given as its mark.
Mark = Callable[[], tuple[str, str] | None]
Kind = Literal["claim", "retain", "release"]
#: What a release has left: the key is free, one more run is wanted, or it was lost before and nobody can tell.
Released = Literal["free", "again", "lost"]


@dataclass(frozen=True, slots=True)
class KeyStep:
    """What becomes of a key when its message is enqueued; `claim`, `retain` and `release` make them.

    Attributes:
      more: What its script takes beside message id, ttl and state.
      fresh: Whether the message is sent for the first time.
      once: Whether a copy of it that is in the queue already is enough.
      after: The message id and run whose key it takes over.
    """

    kind: Kind
    key: str
    message_id: str
    ttl: timedelta
    more: tuple[str | int, ...]
    fresh: bool = False
    once: bool = False
    after: tuple[str, str] = ("", "")

    def arguments(self, *, reserved: bool = False) -> list[str | int]:
        """Those of its script.

        Parameters:
          reserved: Whether the message is to be enqueued after it, and may never come.
        """
        ttl, state = (RESERVED_FOR, "reserved") if reserved else (self.ttl, "waiting")
        return [self.message_id, milliseconds(ttl), state, *self.more]


def claim(
    key: str,
    message_id: str,
    ttl: timedelta,
    *,
    again: bool = False,
    never_drop: bool = False,
    after: tuple[str, str] = ("", ""),
    tick: str = "",
    fresh: bool = False,
    once: bool = False,
    supersede: bool = False,
    position: str | None = None,
) -> KeyStep:
    """Take the key unless another message holds it.

    Parameters:
      again: Ask for one more run when the other is running.
      never_drop: Whether the message is enqueued in any case, without the key if need be.
      after: The message id and run that is over and whose key this one takes over, because it is the one more run.
      tick: The claim by which the scheduler sent it; empty for messages of no tick.
      supersede: Take the key from a message that waits for a retry, unless the retry is due soon.
      position: What is left to the message that stands for it if it is dropped; null: it carries none.
    """
    left = () if position is None else (position, milliseconds(POSITION_REMEMBERED))
    due_later_than = milliseconds(SUPERSEDED_BEFORE_DUE) if supersede else ""
    more = (int(again), int(never_drop), *after, tick, due_later_than, *left)
    return KeyStep("claim", key, message_id, ttl, more, fresh, once, after)


def retain(
    key: str,
    message_id: str,
    run: str,
    ttl: timedelta,
    *,
    still_again: bool = False,
    tick: str = "",
    ttl_after_due: timedelta | None = None,
    completion: str = "",
) -> KeyStep:
    """Keep the key for the message that goes back to the queue; not what another has taken.

    Parameters:
      run: The token of its run; empty when it did not run.
      still_again: Whether one more run, if it is wanted, is wanted after the next as well.
      tick: As for `claim`.
      ttl_after_due: The part of `ttl` after the retry's due time, if a new message may supersede the retry.
      completion: The key in Redis of the message's completion; a retry of a completed message takes no key.
    """
    retry = "" if ttl_after_due is None else milliseconds(ttl_after_due)
    return KeyStep("retain", key, message_id, ttl, (run, int(still_again), tick, retry, completion))


def release(key: str, message_id: str, run: str, ttl: timedelta, *, at_once: bool = False, tick: str = "") -> KeyStep:
    """Free what this delivery of the message holds.

    Parameters:
      ttl: For how long it is held on where one more run is wanted.
      at_once: Free it even then.
      tick: As for `claim`; what did not run frees nothing of another copy of its message, with another claim.
    """
    return KeyStep("release", key, message_id, ttl, (run, int(at_once), "" if run else tick))


class DeduplicationKeys:
    """Who holds which key. Every method may raise `RedisUnavailable`, and may then be repeated.

    A key is held by a message, and while it runs by one delivery of it: a second delivery of the same
    message cannot free what the first one uses.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self.client = client
        self.prefix = key_prefix(namespace)
        register: Any = client.register_script
        self._steps: dict[Kind, Any] = {
            "claim": register(scripts.CLAIM),
            "retain": register(scripts.RETAIN),
            "release": register(scripts.RELEASE),
        }
        self._confirm = register(scripts.CONFIRM)
        self._start = register(scripts.START)
        self._renew = register(scripts.RENEW)

    def take(self, step: KeyStep) -> str:
        """Take a step by itself; returns who holds the key instead, or an empty text.

        What claims a key for a message that is sent for the first time reserves it, until `confirm`.
        """
        with translate_redis_errors():
            return text(self.queue(step, None))

    def queue(self, step: KeyStep, pipeline: Pipeline | None) -> Any:
        """The same in a pipeline, where its answer comes with the others'."""
        arguments = step.arguments(reserved=step.fresh and step.kind == "claim")
        return self._steps[step.kind](keys=[self.prefix + step.key], args=arguments, client=pipeline)

    def confirm(self, step: KeyStep, pipeline: Pipeline | None = None) -> None:
        """What was reserved by this step is in the queue."""
        with translate_redis_errors():
            arguments = [step.message_id, milliseconds(step.ttl), *step.after]
            self._confirm(keys=[self.prefix + step.key], args=arguments, client=pipeline)

    def start(
        self, key: str, message_id: str, run: str, ttl: timedelta | None, mark: tuple[str, str] | None = None
    ) -> str:
        """Begin a run unless another message holds the key; returns ``ours``, or the other's state.

        Returns ``superseded:`` with the id of the new message for a message whose retry was superseded.

        Parameters:
          ttl: None frees the key, because it stands for waiting only.
          mark: Another key, and what it says as long as no other delivery of the message is at work; ``elsewhere``
            is returned when one is.
        """
        with translate_redis_errors():
            mark_key, says = mark or ("", "")
            ttl_ms = 0 if ttl is None else milliseconds(ttl)
            arguments = [message_id, ttl_ms, run, says, milliseconds(_DROP_REMEMBERED)]
            return text(self._start(keys=[self.prefix + key, *([mark_key] if mark else [])], args=arguments))

    def renew(self, key: str, run: str, ttl: timedelta) -> bool:
        """Back to the full ttl; False when the run no longer holds it."""
        with translate_redis_errors():
            return bool(self._renew(keys=[self.prefix + key], args=[run, milliseconds(ttl)]))

    def release(self, step: KeyStep) -> Released:
        """Take a step of `release`, and say what is left."""
        with translate_redis_errors():
            answers: tuple[Released, ...] = ("free", "again", "lost")
            return answers[int(self.queue(step, None))]


def key_prefix(namespace: str) -> str:
    """What the name in Redis of every key begins with."""
    return f"{namespace}:dedup:{KEY_VERSION}:"


def position_prefix(namespace: str) -> str:
    """What the name in Redis of every position that a dropped message has left begins with."""
    return key_prefix(namespace).replace(":dedup:", ":position:", 1)  # as the script has it


def text(value: bytes | str | int | None) -> str:
    """An answer of Redis as text, whatever the client makes of it."""
    return value.decode() if isinstance(value, bytes) else value if isinstance(value, str) else ""


def milliseconds(length: timedelta) -> int:
    """A length of time in whole milliseconds."""
    return int(length.total_seconds() * 1000)
