"""Delay queues of RabbitMQ: levels whose messages all wait equally long, from a minute to three days.

A message that is due in five hours waits in the level of 4 h 16 min, returns to its delay queue, and continues to the
levels for the remaining minutes. It spends the last minute in a worker's memory, as in Dramatiq. RabbitMQ expires the
messages of a queue in order, so one queue for different delays would keep near messages behind far ones.

The queues are quorum queues, because only they hand over an expired message safely: the message is removed once the
target queue has confirmed it. They need RabbitMQ 3.10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dramatiq import Message
from dramatiq.common import current_millis, q_name


@dataclass(frozen=True, slots=True)
class Level:
    """Queue in which every message waits for `seconds`."""

    seconds: int


#: From a minute to about three days, each four times the previous one. A message waits in each at most three times,
#: except in the last.
LEVELS: Final = tuple(Level(60 * 4**power) for power in range(7))


def level_for(message: Message[Any]) -> Level | None:
    """Return the longest level that ends before the message is due; None in the last minute, or without a delay."""
    eta = message.options.get("eta")
    if message.queue_name == q_name(message.queue_name) or not isinstance(eta, int | float):
        return None
    left_ms = eta - current_millis()  # not divided, because a huge int does not fit a float
    ending_before = (level for level in LEVELS if level.seconds * 1000 < left_ms)
    return max(ending_before, key=lambda level: level.seconds, default=None)


def level_queue(delay_queue: str, level: Level) -> str:
    """Return the name in RabbitMQ of a level of a delay queue."""
    return f"{delay_queue}.{level.seconds}s"


def level_queues(delay_queue: str) -> list[str]:
    """Return the names in RabbitMQ of all levels of a delay queue, whether they exist or not."""
    return [level_queue(delay_queue, level) for level in LEVELS]


def declare(channel: Any, delay_queue: str, level: Level) -> None:
    """Declare a level of a delay queue in RabbitMQ."""
    channel.queue_declare(
        level_queue(delay_queue, level),
        durable=True,
        arguments={
            "x-queue-type": "quorum",
            "x-message-ttl": level.seconds * 1000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": delay_queue,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",  # required by the strategy
        },
    )
