"""Dead letters, the interface of their stores, and how they are requeued."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, Protocol

from dramatiq import Broker, Message
from dramatiq.errors import DecodeError
from dramatiq.middleware import MiddlewareError

from housekeeping.brokers.validation import wrong_type
from housekeeping.core.errors import DeadLetterRefused, RedisUnavailable
from housekeeping.core.middleware_errors import SkipEnqueue, StoreUnavailable
from housekeeping.core.sanitize import error_line
from housekeeping.middleware.deduplication.options import as_new

#: Message options of the past attempts. A `tick` stays, because the requeued message is another attempt at that tick.
#: An `idempotency_key` and callbacks stay, because the message is the same.
_PAST_ATTEMPTS: Final = frozenset(
    {"retries", "traceback", "requeue_timestamp", "redis_message_id", "eta", "claim", "scheduled_at", "duplicate_of"}
)
#: Errors of one message, and not of a server. Its sender, or an older release, chose what it contains.
_BROKEN: Final = (DeadLetterRefused, ValueError, TypeError, KeyError, AttributeError)
#: Sort key of a dead letter without a known time of death.
NEVER: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that the broker has given up.

    Attributes:
      broker_id: The broker's id.
      queue: The queue of the message.
      died_at: When the broker gave it up; None if unknown.
      body: The encoded message.
      message: The decoded message; None if the body cannot be decoded.
      unreadable: Why the body cannot be decoded; empty if it can.
    """

    broker_id: str
    queue: str
    died_at: datetime | None
    body: bytes
    message: Message[Any] | None
    unreadable: str = ""

    @classmethod
    def read(cls, broker_id: str, queue: str, died_at: datetime | None, body: bytes) -> DeadLetter:
        """Return the dead letter of a message body, even if the body cannot be decoded."""
        try:
            message: Message[Any] = Message.decode(body)
        except (DecodeError, RecursionError) as error:
            return cls(broker_id, queue, died_at, body, None, error_line(error.__cause__ or error))
        if wrong := wrong_type(message):
            return cls(broker_id, queue, died_at, body, None, wrong)
        return cls(broker_id, queue, died_at, body, message)

    @property
    def id(self) -> str:
        """Return the message id, or the broker's id for an unreadable message."""
        return self.message.message_id if self.message else self.broker_id

    @property
    def retries(self) -> int:
        """Return the number of retries."""
        retries = self.message.options.get("retries", 0) if self.message else 0
        return retries if isinstance(retries, int) else 0

    @property
    def traceback(self) -> str | None:
        """Return the traceback of the last error, if known."""
        traceback = self.message.options.get("traceback") if self.message else None
        return traceback if isinstance(traceback, str) else None

    @property
    def error(self) -> str | None:
        """Return the traceback's line with the error; without a traceback, why the message cannot be read, or None."""
        text = (self.traceback or "").strip()
        if not text:
            return self.unreadable or None
        # Not simply the last line: an error's text may have several lines, and the first says most.
        _, frame, rest = text.rpartition('\n  File "')
        lines = rest.splitlines()
        after = lines[1:] if frame else lines
        return next((line for line in after if not line.startswith(" ")), lines[-1])

    def revived(self, broker: Broker) -> Message[Any]:
        """Return the message for a new start in its actor's queue.

        Raises:
          DeadLetterRefused: When the message cannot be read.
        """
        if self.message is None:
            raise DeadLetterRefused(f"{self.broker_id!r} cannot be sent again, because it cannot be read")
        actor = broker.actors.get(self.message.actor_name)
        return as_new(
            dataclasses.replace(
                self.message,
                queue_name=actor.queue_name if actor else self.queue,
                options={name: value for name, value in self.message.options.items() if name not in _PAST_ATTEMPTS},
                message_timestamp=int(
                    time.time() * 1000
                ),  # otherwise a message with `max_age` would be dropped at once
            )
        )


@dataclass(frozen=True, slots=True)
class LetterResult:
    """Result of requeueing or deleting a dead letter.

    Attributes:
      outcome: ``requeued``: it is in its queue. ``deleted``: it is gone for good. ``duplicate`` or ``refused``: it
        stays a dead letter. ``gone``: it was already requeued or deleted.
      detail: For a duplicate, the id of the message that holds its key, if known. If refused, the reason.
    """

    id: str
    outcome: Literal["requeued", "deleted", "duplicate", "refused", "gone"]
    detail: str | None = None


class DeadLetterStore(Protocol):
    """The dead letters of one broker."""

    def counts(self) -> dict[str, int]:
        """Return the number of dead letters by queue; queues without any are left out."""

    def newest(self, limit: int) -> list[DeadLetter]:
        """Return the newest dead letters of all queues."""

    def newest_first(self, queue: str | None = None, died_until: datetime | None = None) -> Iterator[DeadLetter]:
        """Yield the dead letters of one queue or of all, newest first; with a time, only those that died by then."""

    def find(self, ids: Collection[str]) -> dict[str, DeadLetter]:
        """Return dead letters by message id or broker id; of several with the same id, the newest."""

    def requeue(self, letter: DeadLetter) -> LetterResult:
        """Move a dead letter back to its queue, through the middleware's hooks; atomic, also if the process dies.

        Raises:
          DeadLetterRefused: When the message cannot be read.
        """

    def requeue_each(self, letters: Sequence[DeadLetter]) -> Iterator[LetterResult]:
        """Requeue dead letters, each by itself; one that cannot be sent is refused, and the others are requeued."""

    def delete_each(self, letters: Sequence[DeadLetter]) -> Iterator[LetterResult]:
        """Delete dead letters for good, each by itself."""


def refuse_broken(letter: DeadLetter, requeue_letter: Callable[[], LetterResult]) -> LetterResult:
    """Requeue a letter. Refuse it if its message is broken, so that the next ones are still requeued."""
    try:
        return requeue_letter()
    except _BROKEN as error:
        return LetterResult(letter.id, "refused", error_line(error))


def by_queue(letters: Iterable[DeadLetter]) -> dict[str, dict[str, DeadLetter]]:
    """Return the letters of each queue by their broker ids."""
    found: dict[str, dict[str, DeadLetter]] = {}
    for letter in letters:
        found.setdefault(letter.queue, {})[letter.broker_id] = letter
    return found


def run_hooks_before(broker: Broker, letter: DeadLetter, message: Message[Any]) -> LetterResult | None:
    """Run the hooks before enqueueing; returns the result if they reject the message, else None.

    Raises:
      RedisUnavailable: When a hook needs Redis, which does not answer.
    """
    try:
        broker.emit_before("enqueue", message, None)
    except SkipEnqueue as skip:
        return LetterResult(letter.id, "duplicate", skip.duplicate_of)
    except StoreUnavailable as error:
        raise RedisUnavailable(str(error)) from error
    except MiddlewareError as error:
        return LetterResult(letter.id, "refused", error_line(error))
    return None


def found(store: DeadLetterStore, ids: Sequence[str]) -> list[DeadLetter]:
    """Return the dead letters with these ids, in this order, each once.

    Raises:
      DeadLetterRefused: When one of the ids has no dead letter.
    """
    letters, given = store.find(set(ids)), list(dict.fromkeys(ids))
    for each in given:
        if each not in letters:
            raise DeadLetterRefused(f"there is no dead letter {each!r}; see: housekeeping deadletters list")
    return [letters[each] for each in given]


def requeue(store: DeadLetterStore, ids: Sequence[str]) -> list[LetterResult]:
    """Requeue dead letters; returns the result for each.

    Raises:
      DeadLetterRefused: When one does not exist or cannot be read; then none is requeued.
    """
    return [store.requeue(letter) for letter in readable(found(store, ids))]


def readable(letters: Sequence[DeadLetter]) -> Sequence[DeadLetter]:
    """Return the letters if all of them can be read.

    Raises:
      DeadLetterRefused: When one cannot be read.
    """
    for letter in letters:
        if letter.message is None:
            raise DeadLetterRefused(
                f"{letter.broker_id!r} cannot be sent again, because it cannot be read: {letter.unreadable}"
            )
    return letters
