"""Dead letters in RabbitMQ, where each queue has a dead-letter queue of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from dramatiq.common import xq_name
from dramatiq.errors import ConnectionClosed
from pika.exceptions import AMQPError

from housekeeping.brokers.dead_letters.models import NEVER, DeadLetter, Requeued, run_hooks_before
from housekeeping.core.errors import BrokerUnavailable
from housekeeping.core.sanitize import error_line


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
        with self._channel() as channel:
            letters = [letter for queue in self._queues() for _, letter in self._fetched(channel, queue)]
        # Times have seconds only, so of equal ones the last in its queue is the newest.
        return sorted(reversed(letters), key=lambda letter: letter.died_at or NEVER, reverse=True)[:limit]

    def find(self, ids: Collection[str]) -> dict[str, DeadLetter]:
        found: dict[str, DeadLetter] = {}
        with self._channel() as channel:
            for queue in self._queues():
                for _, letter in self._fetched(channel, queue):
                    for name in {letter.id, letter.broker_id} & set(ids):
                        other = found.get(name)
                        if other is None or (letter.died_at or NEVER) >= (other.died_at or NEVER):
                            found[name] = letter
        return found

    def requeue(self, letter: DeadLetter) -> Requeued:
        message = letter.revived(self._broker)
        with self._channel() as channel:
            # Declare the queue again: RabbitMQ silently drops messages to a deleted queue.
            self._broker.queues_pending.add(message.queue_name)
            self._broker.declare_queue(message.queue_name, ensure=True)
            # One transaction removes it from the dead letters and publishes it to the queue.
            channel.tx_select()
            tag = next(
                (tag for tag, each in self._fetched(channel, letter.queue) if each.broker_id == letter.broker_id), None
            )
            if tag is None:
                return Requeued(letter.id, "gone")
            if outcome := run_hooks_before(self._broker, letter, message):
                return outcome
            properties = self._broker.properties(priority=message.options.get("broker_priority"))
            channel.basic_publish("", self._broker.physical(message.queue_name), message.encode(), properties)
            channel.basic_ack(tag)
            channel.tx_commit()
            self._broker.emit_after("enqueue", message, None)
        return Requeued(letter.id, "requeued")

    def _queues(self) -> list[str]:
        return sorted(self._broker.get_declared_queues())

    def _count(self, queue: str) -> int:
        declared: Any = self._broker._declare_xq_queue(queue)
        return int(declared.method.message_count)

    def _fetched(self, channel: Any, queue: str) -> Iterator[tuple[int, DeadLetter]]:
        """Yield each dead letter of the queue, oldest first, fetched until the channel is closed."""
        self._broker._declare_xq_queue(queue)  # the queue may have been deleted
        name = self._broker.physical(xq_name(queue))
        while (got := channel.basic_get(name))[0] is not None:
            method, properties, body = got
            died_at = datetime.fromtimestamp(properties.timestamp, UTC) if properties.timestamp else None
            # Without an id: written by Dramatiq's own broker, before it was hardened.
            broker_id = properties.message_id or hashlib.sha256(body).hexdigest()[:32]
            yield method.delivery_tag, DeadLetter.read(broker_id, queue, died_at, body)

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
