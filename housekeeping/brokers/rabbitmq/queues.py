"""Lengths of queues in RabbitMQ, read without changing them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dramatiq.common import dq_name, xq_name
from dramatiq.errors import ConnectionClosed
from pika.exceptions import AMQPError, ChannelClosedByBroker

from housekeeping.brokers.rabbitmq.broker import ReliableRabbitmqBroker
from housekeeping.brokers.rabbitmq.delay_queues import level_queues
from housekeeping.brokers.rabbitmq.errors import translate_rabbitmq_errors
from housekeeping.brokers.rabbitmq.settings import rabbitmq_broker
from housekeeping.core.errors import BrokerUnavailable
from housekeeping.core.settings import Settings

_NOT_FOUND = 404  # AMQP's code


@contextmanager
def connected(settings: Settings) -> Iterator[ReliableRabbitmqBroker]:
    """Yield a connected broker, closed at the end of the block.

    Raises:
      BrokerUnavailable: When RabbitMQ does not answer, also inside the block.
    """
    broker = rabbitmq_broker(settings)
    try:
        translate_rabbitmq_errors(lambda: broker.channel)
        yield broker
    except (AMQPError, ConnectionClosed) as error:
        raise BrokerUnavailable(f"RabbitMQ did not answer: {str(error).removeprefix('RabbitMQ: ')}") from error
    finally:
        broker.close()


def lengths(settings: Settings, names: list[str]) -> dict[str, tuple[int, int, int]]:
    """Return the messages of each queue: waiting, delayed, dead. A missing queue has none.

    Raises:
      BrokerUnavailable: When RabbitMQ does not answer.
    """
    with connected(settings) as broker:
        return {name: (_length(broker, name), _delayed(broker, name), _length(broker, xq_name(name))) for name in names}


def _delayed(broker: ReliableRabbitmqBroker, name: str) -> int:
    delayed = dq_name(name)
    return sum(_length(broker, each) for each in (delayed, *level_queues(delayed)))


def _length(broker: ReliableRabbitmqBroker, name: str) -> int:
    try:
        declared: Any = broker.channel.queue_declare(broker.physical(name), passive=True)
    except ChannelClosedByBroker as error:
        del broker.channel
        if error.reply_code == _NOT_FOUND:
            return 0
        raise
    return int(declared.method.message_count)
