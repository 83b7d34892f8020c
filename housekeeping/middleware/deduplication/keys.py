"""Deduplication keys in Redis: which message holds which key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

import redis
from dramatiq import MessageProxy
from redis.client import Pipeline

from housekeeping.core.redis.client import milliseconds, text, translate_redis_errors
from housekeeping.middleware.deduplication import scripts as scripts
from housekeeping.middleware.deduplication.options import POSITION_REMEMBERED

#: Part of every key. Raised when the format of keys changes, so that releases do not misread each other's keys.
KEY_VERSION: Final = "v1"
#: Maximum time that a key blocks others if the process dies after taking the key and before enqueueing the message. If
#: keys and queue share a Redis, one script does both and this cannot happen.
RESERVED_FOR: Final = timedelta(seconds=5)

#: Only a retry that is due later than this is superseded. A retry that is due before the next run of a scheduler that
#: runs every minute (docs/workers/batched_git_ref_updates.md) does the work soon enough.
SUPERSEDED_BEFORE_DUE: Final = timedelta(minutes=1)
#: How long a superseded message is remembered once dropped. Longer than the broker's heartbeat timeout (60 s), after
#: which it is delivered again if its worker was killed before the acknowledgement.
DROP_REMEMBERED: Final = timedelta(minutes=5)

Kind = Literal["claim", "retain", "release"]
#: Result of a release: the key is free, a rerun is wanted, or the run had lost its key and the rest is unknown.
Released = Literal["free", "again", "lost"]


@dataclass(frozen=True, slots=True)
class KeyStep:
    """Change of a key in Redis when a message is enqueued or ends; made by `claim`, `retain` or `release`.

    Attributes:
      more: Further arguments of the kind's Lua script, after message id, TTL and state.
      fresh: Whether the message is new, neither a retry nor a requeue.
      once: Whether the message is not enqueued if a copy of it waits in the queue.
      after: Message id and run token of the holder whose key this rerun takes over; empty if it is no rerun.
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
        """Return the arguments of the step's Lua script.

        Parameters:
          reserved: Hold the key only briefly until `confirm`, because the message is not yet in the queue.
        """
        ttl, state = (RESERVED_FOR, "reserved") if reserved else (self.ttl, "waiting")
        return [self.message_id, milliseconds(ttl), state, *self.more]

    def shared_arguments(self) -> tuple[object, ...] | None:
        """Return the arguments by which claims are grouped into one script call; None if this is no claim."""
        return (self.once, self.ttl, self.more) if self.kind == "claim" else None


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
    """Return the step that takes the key unless another message holds it.

    Parameters:
      again: Request a rerun after the holder, if it is running.
      never_drop: Enqueue the message even if another one holds the key.
      after: Message id and token of the ended run whose key this rerun takes over.
      tick: Token with which the scheduler claimed the message's tick; empty if no scheduler sent it.
      supersede: Take the key from a message that waits for a retry, unless the retry is due soon.
      position: The message's database position, kept for the holder if this message is dropped; None if it has none.
    """
    remembered = () if position is None else (position, milliseconds(POSITION_REMEMBERED))
    due_later_than = milliseconds(SUPERSEDED_BEFORE_DUE) if supersede else ""
    more = (int(again), int(never_drop), *after, tick, due_later_than, *remembered)
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
    """Return the step that keeps the key for a message that is requeued or retried, unless another message holds it.

    Parameters:
      run: The token of the run; empty when the message did not run.
      still_again: Whether a requested rerun is kept until after the next run.
      tick: As for `claim`.
      ttl_after_due: The part of `ttl` after the retry's due time, if a new message may supersede the retry.
      completion: The Redis key of the message's completion. A retry of a completed message takes no key.
    """
    retry = "" if ttl_after_due is None else milliseconds(ttl_after_due)
    return KeyStep("retain", key, message_id, ttl, (run, int(still_again), tick, retry, completion))


def release(key: str, message_id: str, run: str, ttl: timedelta, *, at_once: bool = False, tick: str = "") -> KeyStep:
    """Return the step that releases the key if this delivery of the message holds it.

    Parameters:
      ttl: How long the key stays held for a requested rerun.
      at_once: Release the key even if a rerun was requested.
      tick: As for `claim`. A copy of the message that did not run leaves a key with another copy's token alone.
    """
    return KeyStep("release", key, message_id, ttl, (run, int(at_once), "" if run else tick))


class DeduplicationKeys:
    """The deduplication keys of an application. Any method may raise `RedisUnavailable`; all are safe to repeat.

    A waiting message holds a key by its id. A running one holds it by the token of its run, so that a second delivery
    of the same message cannot release the key.
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
        self._renew = register(scripts.RENEW)
        self._queues = ""  # namespace of the queues, if they are on the same Redis

    def share_redis_with_queues(self, namespace: str) -> None:
        """Tell where the queues are, so that a new message can take the key of a message that has left them."""
        self._queues = namespace

    def copy_of(self, message: MessageProxy) -> tuple[str, str]:
        """Return the id in Redis of a delivered message and the Redis key of its queue's bodies, else empty strings."""
        copy = message.options.get("redis_message_id")
        return (copy, f"{self._queues}:{message.queue_name}.msgs") if self._queues and copy else ("", "")

    def take(self, step: KeyStep) -> str:
        """Execute a step without enqueueing; return the id of the message that prevents it, or an empty string.

        A claim for a message that is sent for the first time reserves the key until `confirm`.
        """
        with translate_redis_errors():
            return text(self._run(step, None))

    def take_many(self, steps: Sequence[KeyStep | None]) -> list[str]:
        """Execute steps as `take` does, in one round trip; None stands for a message without a key."""
        with translate_redis_errors(), self.client.pipeline(transaction=False) as pipeline:
            for step in steps:
                if step is not None:
                    self._run(step, pipeline)
            holders = iter(pipeline.execute())
        return ["" if step is None else text(next(holders)) for step in steps]

    def confirm(self, step: KeyStep, pipeline: Pipeline | None = None) -> None:
        """Turn a reserved key into a held one, because its message is now in the queue."""
        with translate_redis_errors():
            arguments = [step.message_id, milliseconds(step.ttl), *step.after]
            self._confirm(keys=[self.prefix + step.key], args=arguments, client=pipeline)

    def confirm_many(self, steps: Sequence[KeyStep | None]) -> None:
        """Call `confirm` for several steps, in one round trip."""
        with translate_redis_errors(), self.client.pipeline(transaction=False) as pipeline:
            for step in steps:
                if step is not None:
                    self.confirm(step, pipeline)
            pipeline.execute()

    def renew(self, key: str, run: str, ttl: timedelta) -> bool:
        """Extend the key's TTL; return False if the run no longer holds it."""
        with translate_redis_errors():
            return bool(self._renew(keys=[self.prefix + key], args=[run, milliseconds(ttl)]))

    def release(self, step: KeyStep) -> Released:
        """Execute a step made by `release`; return the state of the key."""
        with translate_redis_errors():
            answers: tuple[Released, ...] = ("free", "again", "lost")
            return answers[int(self._run(step, None))]

    def _run(self, step: KeyStep, pipeline: Pipeline | None) -> Any:
        arguments = step.arguments(reserved=step.fresh and step.kind == "claim")
        return self._steps[step.kind](keys=[self.prefix + step.key], args=arguments, client=pipeline)


def key_prefix(namespace: str) -> str:
    """Return the prefix of every deduplication key in Redis."""
    return f"{namespace}:dedup:{KEY_VERSION}:"


def position_prefix(namespace: str) -> str:
    """Return the prefix of the Redis keys that hold the positions of dropped messages."""
    return key_prefix(namespace).replace(":dedup:", ":position:", 1)  # the script builds the name in the same way
