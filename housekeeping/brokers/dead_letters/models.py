"""A dead letter, what a broker must offer for it, and how it becomes a message once more."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
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

#: What belongs to the life that is over. A `tick` stays: what is done now is another attempt at that tick, and its
#: outcome the tick's. An `idempotency_key` stays, and what others wait for: the message is the same.
_OLD_LIFE: Final = frozenset(
    {"retries", "traceback", "requeue_timestamp", "redis_message_id", "eta", "claim", "scheduled_at", "duplicate_of"}
)


#: In the place of a time of death that the broker does not say.
NEVER: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that was given up.

    Attributes:
      broker_id: What its broker calls it.
      queue: Of which queue it is.
      died_at: When the broker gave it up; null when the broker does not say.
      body: What the broker has of it.
      message: The same, read; null when it cannot be.
      unreadable: Why it cannot be read; empty when it can.
    """

    broker_id: str
    queue: str
    died_at: datetime | None
    body: bytes
    message: Message[Any] | None
    unreadable: str = ""

    @classmethod
    def read(cls, broker_id: str, queue: str, died_at: datetime | None, body: bytes) -> DeadLetter:
        """A dead letter from what the broker has of it, whatever that is."""
        try:
            message: Message[Any] = Message.decode(body)
        except (DecodeError, RecursionError) as error:
            return cls(broker_id, queue, died_at, body, None, error_line(error.__cause__ or error))
        if wrong := wrong_type(message):
            return cls(broker_id, queue, died_at, body, None, wrong)
        return cls(broker_id, queue, died_at, body, message)

    @property
    def id(self) -> str:
        """The message id; the broker's own for one that cannot be read."""
        return self.message.message_id if self.message else self.broker_id

    @property
    def retries(self) -> int:
        """How often it was tried again."""
        retries = self.message.options.get("retries", 0) if self.message else 0
        return retries if isinstance(retries, int) else 0

    @property
    def traceback(self) -> str | None:
        """Of its last error, when the broker has it."""
        traceback = self.message.options.get("traceback") if self.message else None
        return traceback if isinstance(traceback, str) else None

    @property
    def error(self) -> str | None:
        """Why it cannot be read, or the line of the traceback that says what went wrong."""
        lines = (self.traceback or "").strip().splitlines()
        if not lines:
            return self.unreadable or None
        # Not simply the last line: the text of an error may have several, and the first one says most.
        frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
        after = lines[frames[-1] + 1 :] if frames else lines
        return next((line for line in after if not line.startswith(" ")), lines[-1])

    def revived(self, broker: Broker) -> Message[Any]:
        """The message as a new life begins, for the queue of its actor.

        Raises:
          DeadLetterRefused: When it cannot be read.
        """
        if self.message is None:
            raise DeadLetterRefused(f"{self.broker_id!r} cannot be sent again, because it cannot be read")
        actor = broker.actors.get(self.message.actor_name)
        return as_new(
            dataclasses.replace(
                self.message,
                queue_name=actor.queue_name if actor else self.queue,
                options={name: value for name, value in self.message.options.items() if name not in _OLD_LIFE},
                message_timestamp=int(time.time() * 1000),  # else one with a `max_age` dies at once, of old age
            )
        )


@dataclass(frozen=True, slots=True)
class Requeued:
    """What became of a dead letter that was to be sent once more.

    Attributes:
      outcome: It is in its queue; it is a duplicate, or was refused, and stays where it is; somebody else was quicker.
      detail: Of a duplicate, the id of the message that holds its key, if known; of one refused, why.
    """

    id: str
    outcome: Literal["requeued", "duplicate", "refused", "gone"]
    detail: str | None = None


class DeadLetterStore(Protocol):
    """The dead letters of one broker."""

    def counts(self) -> dict[str, int]:
        """How many there are, by queue; queues without any are left out."""

    def newest(self, limit: int) -> list[DeadLetter]:
        """The last ones to die, of all queues."""

    def find(self, ids: Collection[str]) -> dict[str, DeadLetter]:
        """Those with these message ids, or ids of their broker; of several with one id, the newest."""

    def requeue(self, letter: DeadLetter) -> Requeued:
        """Send it once more, past the middleware. It is never in both places nor in none, whenever the process dies.

        Raises:
          DeadLetterRefused: When it cannot be read.
        """


def turned_away(broker: Broker, letter: DeadLetter, message: Message[Any]) -> Requeued | None:
    """Run the hooks before an enqueueing; what became of the letter where they keep its message out.

    Raises:
      RedisUnavailable: When a hook cannot say without Redis, which does not answer.
    """
    try:
        broker.emit_before("enqueue", message, None)
    except SkipEnqueue as skip:
        return Requeued(letter.id, "duplicate", skip.duplicate_of)
    except StoreUnavailable as error:
        raise RedisUnavailable(str(error)) from error
    except MiddlewareError as error:
        return Requeued(letter.id, "refused", error_line(error))
    return None


def found(store: DeadLetterStore, ids: Sequence[str]) -> list[DeadLetter]:
    """The dead letters with these ids, in this order.

    Raises:
      DeadLetterRefused: When there is none with one of them.
    """
    letters = store.find(set(ids))
    for each in ids:
        if each not in letters:
            raise DeadLetterRefused(f"there is no dead letter {each!r}; see: housekeeping deadletters list")
    return [letters[each] for each in ids]


def requeue(store: DeadLetterStore, ids: Sequence[str]) -> list[Requeued]:
    """Send dead letters once more, and say what became of each.

    Raises:
      DeadLetterRefused: When one is not there or cannot be read; then nothing was done to any.
    """
    letters = found(store, list(dict.fromkeys(ids)))
    for letter in letters:
        if letter.message is None:
            raise DeadLetterRefused(
                f"{letter.broker_id!r} cannot be sent again, because it cannot be read: {letter.unreadable}"
            )
    return [store.requeue(letter) for letter in letters]
