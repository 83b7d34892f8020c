"""Publishing of many messages to one queue of RabbitMQ in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dramatiq import Message
from pika.exceptions import UnroutableError

if TYPE_CHECKING:
    from housekeeping.brokers.rabbitmq.broker import ReliableRabbitmqBroker


def publish_together(broker: ReliableRabbitmqBroker, messages: Sequence[Message[Any]]) -> None:
    """Publish messages of one queue in one transaction, in five round trips for any number.

    RabbitMQ's transactions are atomic within one queue. With confirmations, pika would wait for each before it sends
    the next message.

    Raises:
      UnroutableError: When the queue was deleted; nothing was enqueued.
      AMQPError: When RabbitMQ does not answer; the messages may be in the queue nevertheless.
    """
    queue_name = messages[0].queue_name
    broker.declare_queue(queue_name, ensure=True)
    channel = broker.connection.channel()
    returned: list[Any] = []
    channel.add_on_return_callback(lambda *given: returned.append(given))
    channel.tx_select()
    for message in messages:
        channel.basic_publish(
            exchange="",
            routing_key=broker.physical(queue_name),
            body=message.encode(),
            properties=broker.properties_of(message),
            mandatory=True,
        )
    channel.tx_commit()
    broker.connection.process_data_events(0)  # pika reports returned messages only here
    channel.close()
    if returned:
        broker.queues_pending.add(queue_name)
        raise UnroutableError(returned)
