"""Dead letters in RabbitMQ, where each queue has a dead-letter queue of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any, Final

from dramatiq.common import xq_name
from dramatiq.errors import ConnectionClosed
from pika.exceptions import AMQPError

from housekeeping.brokers.dead_letters.models import (
    NEVER,
    DeadLetter,
    LetterResult,
    by_queue,
    refuse_broken,
    run_hooks_before,
)
from housekeeping.core.errors import BrokerUnavailable
from housekeeping.core.sanitize import error_line

#: Moves a letter, given the channel with a transaction and the tag of its delivery.
_Move = Callable[[Any, int, DeadLetter], LetterResult]


#: The largest number in AMQP.
_MAX_PREFETCH: Final = 65_535
#: Seconds without a letter after which a consumer is not sent more.
_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Stored:
    """A dead letter as RabbitMQ delivers it, not decoded yet; `died_at` is `NEVER` if it is unknown."""

    tag: int
    queue: str
    broker_id: str
    died_at: datetime
    body: bytes

    @classmethod
    def of(cls, queue: str, method: Any, properties: Any, body: bytes) -> _Stored:
        try:
            died_at = datetime.fromtimestamp(properties.timestamp, UTC) if properties.timestamp else NEVER
        except (ValueError, OverflowError, OSError):
            died_at = NEVER  # not a time: another program wrote it
        # Without an id: written by Dramatiq's own broker, before it was hardened.
        broker_id = properties.message_id or hashlib.sha256(body).hexdigest()[:32]
        return cls(method.delivery_tag, queue, broker_id, died_at, body)

    def letter(self) -> DeadLetter:
        return DeadLetter.read(self.broker_id, self.queue, None if self.died_at is NEVER else self.died_at, self.body)


class RabbitmqDeadLetters:
    """Dead letters of the queues that a `ReliableRabbitmqBroker` has declared.

    RabbitMQ delivers a queue only from its head, so every read fetches all dead letters. They return to their places
    when the channel is closed or the process ends. Meanwhile another reader finds none.

    Every method raises `BrokerUnavailable` when RabbitMQ does not answer.
    """

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def counts(self) -> dict[str, int]:
        with self._channel():
            numbers = {queue: self._count(queue) for queue in self._queues()}
        return {queue: number for queue, number in numbers.items() if number}

    def newest(self, limit: int) -> list[DeadLetter]:
        return list(islice(self.newest_first(), limit))

    def newest_first(self, queue: str | None = None, died_until: datetime | None = None) -> Iterator[DeadLetter]:
        with self._channel() as channel:
            queues = [each for each in self._queues() if queue in (None, each)]
            found = [stored for each in queues for stored in self._read(channel, each)]
        if died_until is not None:
            found = [stored for stored in found if stored.died_at <= died_until]
        # Times have seconds only, so of equal ones the last in its queue is the newest.
        for stored in sorted(reversed(found), key=lambda stored: stored.died_at, reverse=True):
            yield stored.letter()

    def find(self, ids: Collection[str]) -> dict[str, DeadLetter]:
        found: dict[str, DeadLetter] = {}
        with self._channel() as channel:
            for queue in self._queues():
                for letter in (stored.letter() for stored in self._read(channel, queue)):
                    for name in {letter.id, letter.broker_id} & set(ids):
                        other = found.get(name)
                        if other is None or (letter.died_at or NEVER) >= (other.died_at or NEVER):
                            found[name] = letter
        return found

    def requeue(self, letter: DeadLetter) -> LetterResult:
        if letter.message is None:
            letter.revived(self._broker)
        [result] = self.requeue_each([letter])
        return result

    def requeue_each(self, letters: Sequence[DeadLetter]) -> Iterator[LetterResult]:
        for queue, wanted in by_queue(letters).items():
            yield from self._move_each(
                queue,
                wanted,
                lambda channel, tag, letter: refuse_broken(letter, partial(self._move, channel, tag, letter)),
            )

    def delete_each(self, letters: Sequence[DeadLetter]) -> Iterator[LetterResult]:
        for queue, wanted in by_queue(letters).items():
            yield from self._move_each(queue, wanted, _delete)

    def _move_each(self, queue: str, wanted: dict[str, DeadLetter], move: _Move) -> Iterator[LetterResult]:
        """Apply the function to these letters of a queue, which is read once, each in a transaction of its own."""
        with self._channel() as channel:
            channel.tx_select()
            self._broker._declare_xq_queue(queue)  # the queue may have been deleted
            for stored in self._fetched(channel, queue):
                if letter := wanted.pop(stored.broker_id, None):
                    yield move(channel, stored.tag, letter)
                if not wanted:
                    break
        yield from (LetterResult(letter.id, "gone") for letter in wanted.values())

    def _move(self, channel: Any, tag: int, letter: DeadLetter) -> LetterResult:
        message = letter.revived(self._broker)
        # Declare the queue again: RabbitMQ silently drops messages to a deleted queue.
        self._broker.queues_pending.add(message.queue_name)
        self._broker.declare_queue(message.queue_name, ensure=True)
        if outcome := run_hooks_before(self._broker, letter, message):
            return outcome
        properties = self._broker.properties_of(message)
        # One transaction publishes it to the queue and removes it from the dead letters.
        channel.basic_publish("", self._broker.physical(message.queue_name), message.encode(), properties)
        channel.basic_ack(tag)
        channel.tx_commit()
        self._broker.emit_after("enqueue", message, None)
        return LetterResult(letter.id, "requeued")

    def _queues(self) -> list[str]:
        return sorted(self._broker.get_declared_queues())

    def _count(self, queue: str) -> int:
        declared: Any = self._broker._declare_xq_queue(queue)
        return int(declared.method.message_count)

    def _read(self, channel: Any, queue: str) -> list[_Stored]:
        """Return the dead letters of the queue, oldest first, fetched until the channel is closed."""
        found: list[_Stored] = []
        waiting = self._count(queue)
        # A consumer is sent many at once, and `basic_get` takes a round trip for each. A quorum queue takes an
        # unlimited prefetch for 2,000, and a server may be configured to another default.
        channel.basic_qos(prefetch_count=_MAX_PREFETCH)
        channel.basic_consume(
            self._name(queue),
            lambda _, method, properties, body: found.append(_Stored.of(queue, method, properties, body)),
        )
        while (before := len(found)) < waiting:
            channel.connection.process_data_events(time_limit=_PAUSE_S)
            if len(found) == before:
                break  # another reader has them, or the prefetch is used up
        found += self._fetched(channel, queue)
        channel.connection.process_data_events(time_limit=0)
        return found

    def _fetched(self, channel: Any, queue: str) -> Iterator[_Stored]:
        """Yield each dead letter of the queue, oldest first, fetched one by one until the channel is closed."""
        while (got := channel.basic_get(self._name(queue)))[0] is not None:
            yield _Stored.of(queue, *got)

    def _name(self, queue: str) -> str:
        return str(self._broker.physical(xq_name(queue)))

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        try:
            # The old connection may be lost, because an idle thread answers no heartbeats.
            channel = self._broker._retry(lambda: self._broker.connection.channel())
            try:
                yield channel
            finally:
                with suppress(AMQPError):
                    channel.close()
        except (
            AMQPError,
            ConnectionClosed,
            OSError,
            AssertionError,
        ) as error:  # the last one as in translate_rabbitmq_errors
            del self._broker.connection
            text = error_line(error).removeprefix("RabbitMQ: ")
            raise BrokerUnavailable(f"RabbitMQ did not answer: {text}") from error


def _delete(channel: Any, tag: int, letter: DeadLetter) -> LetterResult:
    channel.basic_ack(tag)
    channel.tx_commit()
    return LetterResult(letter.id, "deleted")
