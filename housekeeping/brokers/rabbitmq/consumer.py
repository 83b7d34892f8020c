"""Takes messages from RabbitMQ, and acknowledges none but its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dramatiq import Message, MessageProxy
from dramatiq.brokers.rabbitmq import _RabbitmqConsumer, _RabbitmqMessage
from dramatiq.common import q_name
from dramatiq.errors import ConnectionClosed
from pika.exceptions import AMQPError

from housekeeping.brokers.rabbitmq.delay_queues import level_for
from housekeeping.brokers.validation import read
from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.logs import logger as named_logger

if TYPE_CHECKING:
    from housekeeping.brokers.rabbitmq.broker import ReliableRabbitmqBroker

logger = named_logger(__name__)


def let_go(connection: Any) -> None:
    """Close a connection of pika's with all its sockets, in whatever state it is."""
    try:
        connection.close()
    except (AMQPError, OSError, AssertionError):
        # pika leaves some of a lost connection to the garbage collector.
        connection._cleanup()


def said(error: BaseException) -> str:
    """What an error of pika's says, in one line; those of a failed connection say nothing by themselves."""
    inner = error.args[0] if error.args and not str(error) else error
    return error_line(getattr(inner, "exception", inner))


class _Delivery(_RabbitmqMessage):
    """A message and the consumer it came from."""

    def __init__(self, redelivered: bool, tag: int, message: Message[Any], consumer: ReliableConsumer) -> None:
        super().__init__(redelivered, tag, message)
        self.consumer = consumer


class ReliableConsumer(_RabbitmqConsumer):
    """Dramatiq's consumer, safe against what a lost connection and an unreadable message bring.

    RabbitMQ counts deliveries anew on each connection. A message that was at work when the connection was lost would
    acknowledge another message of the new connection, which is then lost if its process ends; Dramatiq's own
    consumer cannot tell them apart. Here each message knows where it came from; those of a lost connection are left
    to their redelivery.
    """

    def __init__(self, broker: ReliableRabbitmqBroker, queue_name: str, prefetch: int, timeout: int) -> None:
        try:
            super().__init__(broker, broker.physical(queue_name), prefetch, timeout)
        except Exception:
            if hasattr(self, "connection"):
                let_go(self.connection)
            raise
        self.queue_name = queue_name

    def __next__(self) -> MessageProxy | None:
        try:
            method, _, body = next(self.iterator)
        except (AssertionError, AMQPError, OSError) as error:
            if getattr(error, "reply_code", None) == 404:  # somebody has deleted the queue
                self.broker.queues_pending.add(q_name(self.queue_name))
            raise ConnectionClosed(f"RabbitMQ: {said(error)}") from None
        if method is None:
            return None
        message, wrong = read(body, self.queue_name)
        if message is None:
            self.broker.bury(self.queue_name, body)
            self.channel.basic_ack(method.delivery_tag)
            logger.error("Unreadable message moved to the dead letters", queue=self.queue_name, error=wrong)
            return None
        if level_for(message) is not None:
            self.broker.put(message)
            self.channel.basic_ack(method.delivery_tag)
            return None
        self.known_tags.add(method.delivery_tag)
        return _Delivery(method.redelivered, method.delivery_tag, message, self)

    def ack(self, message: MessageProxy) -> None:
        if self._is_ours(message):
            super().ack(message)

    def nack(self, message: MessageProxy) -> None:
        """Put the message to the dead letters as it is now, with what it died of.

        Not by RabbitMQ's own way, which keeps it as it was published, and loses it where the server ends just then.
        """
        if self._is_ours(message):
            self.broker.bury(self.queue_name, message.encode())
            super().ack(message)

    def close(self) -> None:
        try:
            super().close()
        finally:
            let_go(self.connection)

    def _is_ours(self, message: MessageProxy) -> bool:
        ours = getattr(message, "consumer", None) is self
        if not ours:
            logger.warning(
                "Message is delivered again, because its connection was lost",
                queue=self.queue_name,
                worker=message.actor_name,
                message_id=message.message_id,
            )
        return ours
