"""Dramatiq's RabbitMQ broker, made reliable; needs pika."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeVar
from uuid import uuid4
from weakref import WeakSet

import pika
from dramatiq import Broker, Consumer, Message
from dramatiq.brokers.rabbitmq import DEAD_MESSAGE_TTL, RabbitmqBroker
from dramatiq.common import current_millis, dq_name, q_name, xq_name
from dramatiq.errors import ConnectionClosed
from pika.exceptions import AMQPChannelError, AMQPError, UnroutableError

from housekeeping.brokers.rabbitmq.bulk import publish_together
from housekeeping.brokers.rabbitmq.consumer import ReliableConsumer
from housekeeping.brokers.rabbitmq.delay_queues import Level, declare, level_for, level_queue, level_queues
from housekeeping.brokers.rabbitmq.errors import (
    NotAccepted,
    QueueDeclaredOtherwise,
    close_connection,
    translate_rabbitmq_errors,
)
from housekeeping.brokers.redis import DEAD_MESSAGE_TTL_MS
from housekeeping.middleware.dramatiq_internals import change_class

T = TypeVar("T")
QueueType = Literal["classic", "quorum"]

#: The first attempt finds that the connection was closed since the last send, the second opens a new one. More attempts
#: would only make the sender wait longer for a server that does not answer.
_ATTEMPTS: Final = 3
_CONNECTION: Final[Any] = vars(RabbitmqBroker)["connection"]
#: Seconds before a message is sent again that RabbitMQ could not store. A queue chooses another leader within a second.
_ELECTION_S: Final = 1.0
#: Of a quorum queue: more deliveries than a message ever has. RabbitMQ 4 would end at 20, without the hooks of the
#: middleware, and drop a dead letter. It counts each delivery without acknowledgement: of every message that a killed
#: worker had fetched, and of every dead letter that was only read.
_QUORUM: Final = {"x-queue-type": "quorum", "x-delivery-limit": 2**31 - 1}


class ReliableRabbitmqBroker(RabbitmqBroker):
    """Dramatiq's RabbitMQ broker, which loses no send and keeps delayed messages in RabbitMQ.

    RabbitMQ confirms each send. A send whose connection is lost is repeated on a new one. The hooks of the middleware
    run once for all attempts. A message that is not due within a minute waits in RabbitMQ (`delay_queues`), because
    RabbitMQ disconnects a consumer that holds a message for half an hour.

    Parameters:
      prefix: Prefix of every queue's name, so that applications can share a RabbitMQ.
      queue_type: ``quorum``: each queue is on most nodes of the cluster, and survives the loss of a minority of them.
        ``classic``: it is on one node.
    """

    _dead_message_ttl_ms: int = DEAD_MESSAGE_TTL_MS

    def __init__(self, *, prefix: str = "", queue_type: QueueType = "classic", **parameters: Any) -> None:
        super().__init__(**{"confirm_delivery": True, **parameters})
        self._prepare(prefix, queue_type)

    def _prepare(self, prefix: str, queue_type: QueueType = "classic") -> None:
        self.prefix = prefix
        # No argument for classic queues: existing ones were declared without it.
        self._type_arguments: dict[str, Any] = _QUORUM if queue_type == "quorum" else {}
        self._levels: set[str] = set()  # those known to exist
        self._owners: dict[Any, threading.Thread] = {}
        self._parents_connections: list[Any] = []
        _ALL.add(self)

    @staticmethod
    def adopt(broker: Broker) -> None:
        """Turn a RabbitMQ broker of Dramatiq's own class into a `ReliableRabbitmqBroker`; any other stays as it is.

        Its queues keep their names and arguments. Its sends are confirmed from now on.
        """
        if type(broker) is RabbitmqBroker:
            del broker.channel  # opened without confirmations, if at all
            change_class(broker, ReliableRabbitmqBroker)
            broker.confirm_delivery = True
            broker._prepare("")  # type: ignore[attr-defined]
            # From the environment if set there: existing queues have it already.
            broker._dead_message_ttl_ms = DEAD_MESSAGE_TTL  # type: ignore[attr-defined]

    @property
    def consumer_class(self) -> type[ReliableConsumer]:
        return ReliableConsumer

    def physical(self, queue_name: str) -> str:
        """Return the name in RabbitMQ of one of Dramatiq's queues."""
        return f"{self.prefix}{queue_name}"

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> Consumer:
        """Return a new consumer for a queue; called by Dramatiq at the start and after each lost connection."""
        consumer: Consumer = translate_rabbitmq_errors(
            lambda: super(ReliableRabbitmqBroker, self).consume(queue_name, prefetch, timeout)
        )
        return consumer

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Enqueue a message; returns when RabbitMQ has confirmed it.

        Parameters:
          delay: In milliseconds.

        Raises:
          ConnectionClosed: When RabbitMQ does not answer, or rejects it.
        """
        queue_name = message.queue_name
        # Before the hooks, so that no key is reserved if RabbitMQ does not answer.
        self._retry(lambda: self.declare_queue(queue_name, ensure=True))
        if delay is not None:
            message = message.copy(queue_name=dq_name(queue_name), options={"eta": current_millis() + delay})
        self.emit_before("enqueue", message, delay)
        self.put(message)
        self.emit_after("enqueue", message, delay)
        return message

    def put(self, message: Message[Any]) -> None:
        """Publish a message to its queue, or to the delay level in which it waits.

        Raises:
          ConnectionClosed: When RabbitMQ does not answer, or rejects it.
        """
        level = level_for(message)
        properties = self.properties_of(message)
        self._retry(lambda: self._publish(message.queue_name, message.encode(), properties, level))

    def put_many(self, messages: Sequence[Message[Any]]) -> None:
        """Publish messages of one queue without delay, all or none, in a constant number of round trips.

        Raises:
          ConnectionClosed: When RabbitMQ does not answer, or rejects them.
        """
        self._retry(lambda: publish_together(self, messages))

    def bury(self, queue_name: str, body: bytes) -> None:
        """Publish a message to the dead letters of a queue, with a new AMQP message id.

        Raises:
          ConnectionClosed: When RabbitMQ does not answer.
        """
        properties = self.properties(message_id=str(uuid4()))
        self._retry(lambda: self._publish(xq_name(q_name(queue_name)), body, properties))

    def properties_of(self, message: Message[Any]) -> Any:
        """Return the properties of a message. A priority that is not a number from 0 to 255 is left out."""
        priority = message.options.get("broker_priority")
        is_octet = isinstance(priority, int) and 0 <= priority <= 255
        return self.properties(priority=priority if is_octet else None)

    @staticmethod
    def properties(**more: Any) -> Any:
        """Return the properties of every message: persistent, with the time."""
        persistent = pika.DeliveryMode.Persistent.value
        return pika.BasicProperties(delivery_mode=persistent, timestamp=int(time.time()), **more)

    def _publish(self, queue_name: str, body: bytes, properties: Any, level: Level | None = None) -> None:
        self.declare_queue(q_name(queue_name), ensure=True)
        target = self.physical(queue_name)
        if level is not None:
            target, delay_queue = level_queue(target, level), target
            if target not in self._levels:
                declare(self.channel, delay_queue, level)
                self._levels.add(target)
        try:
            self.channel.basic_publish(
                exchange="",
                routing_key=target,
                body=body,
                properties=properties,
                mandatory=True,
            )
        except UnroutableError:
            # The queue was deleted.
            self.queues_pending.add(q_name(queue_name))
            self._levels.discard(target)
            raise

    def _retry(self, step: Callable[[], T]) -> T:
        """Run a repeatable step, on a new connection if the last one is broken."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return translate_rabbitmq_errors(step)
            except QueueDeclaredOtherwise:
                del self.connection
                raise
            except NotAccepted:
                time.sleep(_ELECTION_S)
            except ConnectionClosed:
                del self.connection
        try:
            return translate_rabbitmq_errors(step)
        except ConnectionClosed:
            del self.connection
            raise

    def _ensure_queue(self, canonical_queue_name: str) -> None:
        # Without Dramatiq's own retries, which would hide that a queue exists with other arguments.
        if canonical_queue_name in self.queues_pending:
            try:
                self._declare_queue(canonical_queue_name)
                self._declare_dq_queue(canonical_queue_name)
                self._declare_xq_queue(canonical_queue_name)
            except AMQPError:
                del self.connection
                raise
            self.queues_pending.discard(canonical_queue_name)

    def _build_queue_arguments(self, queue_name: str) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_queue_arguments(queue_name)
        own = {"x-dead-letter-routing-key": self.physical(xq_name(queue_name))}
        return {**arguments, **own, **self._type_arguments}

    def _declare_queue(self, queue_name: str) -> Any:
        return self._declare(queue_name, self._build_queue_arguments(queue_name))

    def _declare_dq_queue(self, queue_name: str) -> Any:
        return self._declare(dq_name(queue_name), self._build_queue_arguments(queue_name))

    def _declare_xq_queue(self, queue_name: str) -> Any:
        return self._declare(xq_name(queue_name), {"x-message-ttl": self._dead_message_ttl_ms, **self._type_arguments})

    def _declare(self, queue_name: str, arguments: dict[str, Any]) -> Any:
        return self.channel.queue_declare(queue=self.physical(queue_name), durable=True, arguments=arguments)

    def flush(self, queue_name: str) -> None:
        """Delete all messages of a queue, including delayed and dead ones."""
        super().flush(self.physical(queue_name))
        for name in level_queues(self.physical(dq_name(queue_name))):
            try:
                self.channel.queue_purge(name)
            except AMQPChannelError:
                del self.channel  # closed by RabbitMQ, because there is no such queue

    @property
    def connection(self) -> Any:
        """Return this thread's connection. Before a new one is opened, connections of ended threads are closed."""
        if getattr(self.state, "connection", None) is None:
            self._close_connections_of_ended_threads()
        connection = _CONNECTION.fget(self)
        self._owners[connection] = threading.current_thread()
        return connection

    @connection.deleter
    def connection(self) -> None:
        connection = getattr(self.state, "connection", None)
        _CONNECTION.fdel(self)
        if connection is not None:
            close_connection(connection)

    def close(self) -> None:
        """Close the connections of all threads."""
        super().close()
        for connection in self.connections:
            close_connection(connection)

    def _close_connections_of_ended_threads(self) -> None:
        for connection, thread in list(self._owners.items()):
            is_open = connection in self.connections
            if is_open and thread.is_alive():
                continue
            # Only the thread that removes it closes it: two threads in one pika connection break or block each other.
            if self._owners.pop(connection, None) is not None and is_open:
                self.connections.discard(connection)
                for channel in list(self.channels):
                    if channel.connection is connection:
                        self.channels.discard(channel)
                close_connection(connection)

    def _forget_parents_connections(self) -> None:
        """Stop using the parent's connections in a forked child, because both would write to them."""
        self._parents_connections += [*self.connections, *self.channels]
        self.connections, self.channels, self._owners = set(), set(), {}
        self.state = threading.local()


_ALL: Final[WeakSet[ReliableRabbitmqBroker]] = WeakSet()


def _after_fork() -> None:
    for broker in _ALL:
        broker._forget_parents_connections()


os.register_at_fork(after_in_child=_after_fork)
