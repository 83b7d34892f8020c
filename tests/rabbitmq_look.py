"""Access to RabbitMQ beside the library, for tests."""

from __future__ import annotations

import time
from typing import Any, Final

import pika
from dramatiq import Message, MessageProxy
from dramatiq.common import dq_name, xq_name
from pika.exceptions import ChannelClosedByBroker

from tests.internals.brokers import ReliableConsumer, ReliableRabbitmqBroker, level_queues

_RETURN_S: Final = 2.0


def on_rabbitmq(broker: Any) -> bool:
    """Whether it is RabbitMQ's, and not Redis'."""
    return isinstance(broker, ReliableRabbitmqBroker)


def bodies(broker: ReliableRabbitmqBroker, queue: str, *, take: bool = False) -> list[bytes]:
    """Return the messages that wait in a queue of Dramatiq, oldest first, without those that a consumer holds."""
    return [body for name in _names(broker, queue) for body in _bodies(broker, name, take=take)]


def _names(broker: ReliableRabbitmqBroker, queue: str) -> list[str]:
    name = broker.physical(queue)
    return [name, *level_queues(name)] if queue.endswith(".DQ") else [name]


def _bodies(broker: ReliableRabbitmqBroker, name: str, *, take: bool) -> list[bytes]:
    channel = broker.connection.channel()
    found: list[bytes] = []
    try:
        while (got := channel.basic_get(name, auto_ack=take))[0] is not None:
            found.append(got[2])
    except ChannelClosedByBroker:
        return []  # no such queue
    channel.close()  # what was not taken goes back to its place
    if not take:
        _wait_until_returned(broker, name, len(found))
    return found


def _wait_until_returned(broker: ReliableRabbitmqBroker, name: str, number: int) -> None:
    """Wait until so many messages are ready: a quorum queue takes them back after it has answered."""
    deadline = time.monotonic() + _RETURN_S  # a consumer may take them meanwhile
    while broker.channel.queue_declare(name, passive=True).method.message_count < number:
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def messages(broker: Any, queue: str) -> list[Message[Any]]:
    """Return the same messages decoded, with those that a worker holds if the broker is `watched`."""
    held = [message for name, message in getattr(broker, "held", {}).values() if name == queue]
    waiting = map(Message.decode, bodies(broker, queue))
    return sorted([*held, *waiting], key=lambda message: message.message_timestamp)


class Watched(ReliableRabbitmqBroker):
    """The library's broker, which shows the messages that its consumers hold."""

    held: dict[int, tuple[str, Message[Any]]]

    @property
    def consumer_class(self) -> type[ReliableConsumer]:
        return _WatchedConsumer


def watched(broker: Any) -> None:
    """Have the broker show, from now on, what its consumers hold."""
    broker.__class__ = Watched
    broker.held = {}


class _WatchedConsumer(ReliableConsumer):
    def __next__(self) -> MessageProxy | None:
        message = super().__next__()
        if message is not None:
            self.broker.held[id(message)] = (self.queue_name, Message.decode(message.encode()))
        return message

    def ack(self, message: MessageProxy) -> None:
        super().ack(message)
        self.broker.held.pop(id(message), None)

    def nack(self, message: MessageProxy) -> None:
        super().nack(message)
        self.broker.held.pop(id(message), None)

    def close(self) -> None:
        super().close()
        self.broker.held = {tag: held for tag, held in self.broker.held.items() if held[0] != self.queue_name}


class Pulling(_WatchedConsumer):
    """The library's consumer, but that it takes a message only when it is asked for one."""

    def __init__(self, broker: Any, queue_name: str) -> None:
        self.broker, self.queue_name = broker, queue_name
        self.logger = broker.logger
        broker.declare_queue(queue_name, ensure=True)
        self.connection = pika.BlockingConnection(broker.parameters)
        self.channel = self.connection.channel()
        self.known_tags: set[int] = set()
        self.iterator = iter(lambda: self.channel.basic_get(broker.physical(queue_name)), ())

    def ack(self, message: MessageProxy) -> None:
        super().ack(message)
        self._done()

    def nack(self, message: MessageProxy) -> None:
        super().nack(message)
        self._done()

    def _done(self) -> None:
        self.connection.process_data_events(0)
        # The answer comes after RabbitMQ has dealt with what was said before.
        self.channel.queue_declare(self.broker.physical(self.queue_name), passive=True)


def end_delays(broker: Any, queue: str) -> None:
    """Move the messages that are not due within a minute to where a worker takes them, as if it were time."""
    delayed = dq_name(queue)
    for name in level_queues(broker.physical(delayed)):
        for body in _bodies(broker, name, take=True):
            broker.put(Message.decode(body).copy(queue_name=delayed, options={"eta": 0}))


def remove(broker: Any) -> None:
    """Delete every queue of the broker, and close its connections."""
    for queue in broker.get_declared_queues():
        names = [broker.physical(name) for name in (queue, xq_name(queue))]
        for name in (*names, *_names(broker, dq_name(queue))):
            broker.channel.queue_delete(name)
    broker.close()
