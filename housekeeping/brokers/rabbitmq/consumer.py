"""Takes messages from RabbitMQ, and acknowledges none but its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dramatiq import Message, MessageProxy
from dramatiq.brokers.rabbitmq import _RabbitmqConsumer, _RabbitmqMessage
from dramatiq.common import q_name
from dramatiq.errors import ConnectionClosed
from pika.exceptions import AMQPError

from housekeeping.brokers.rabbitmq.delay_queues import level_for
from housekeeping.brokers.rabbitmq.errors import close_connection, pika_error_line
from housekeeping.brokers.validation import read
from housekeeping.core.telemetry.logs import logger as named_logger

if TYPE_CHECKING:
    from housekeeping.brokers.rabbitmq.broker import ReliableRabbitmqBroker

logger = named_logger(__name__)


class _Delivery(_RabbitmqMessage):
    """A message and the consumer that delivered it."""

    def __init__(self, redelivered: bool, tag: int, message: Message[Any], consumer: ReliableConsumer) -> None:
        super().__init__(redelivered, tag, message)
        self.consumer = consumer


class ReliableConsumer(_RabbitmqConsumer):
    """Dramatiq's consumer, which handles a lost connection and unreadable messages.

    RabbitMQ restarts its delivery numbers on each connection. A message that was running when the connection was lost
    would acknowledge another message of the new connection, which is then lost if its process ends. Dramatiq's own
    consumer cannot tell them apart. Here each message has its consumer, and messages of a lost connection are left to
    their redelivery.
    """

    def __init__(self, broker: ReliableRabbitmqBroker, queue_name: str, prefetch: int, timeout: int) -> None:
        try:
            super().__init__(broker, broker.physical(queue_name), prefetch, timeout)
        except Exception:
            if hasattr(self, "connection"):
                close_connection(self.connection)
            raise
        self.queue_name = queue_name

    def __next__(self) -> MessageProxy | None:
        try:
            method, _, body = next(self.iterator)
        except (AssertionError, AMQPError, OSError) as error:
            if getattr(error, "reply_code", None) == 404:  # the queue was deleted
                self.broker.queues_pending.add(q_name(self.queue_name))
            raise ConnectionClosed(f"RabbitMQ: {pika_error_line(error)}") from None
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
        if self._is_from_here(message):
            super().ack(message)

    def nack(self, message: MessageProxy) -> None:
        """Move the message to the dead letters as it is now, with its error.

        RabbitMQ's own dead-lettering keeps the message as it was published, and may lose it if the server ends.
        """
        if self._is_from_here(message):
            self.broker.bury(self.queue_name, message.encode())
            super().ack(message)

    def close(self) -> None:
        try:
            super().close()
        finally:
            close_connection(self.connection)

    def _is_from_here(self, message: MessageProxy) -> bool:
        from_here = getattr(message, "consumer", None) is self
        if not from_here:
            logger.warning(
                "Message is delivered again, because its connection was lost",
                queue=self.queue_name,
                worker=message.actor_name,
                message_id=message.message_id,
            )
        return from_here
