"""Where delayed messages wait in RabbitMQ: queues whose messages all wait equally long, from a minute to days.

A message that is due in five hours waits in the level of 4 h 16 min, comes back to its delay queue, and from there
goes on to the levels of the minutes that are left. The last minute it spends in a worker's memory, as
Dramatiq does it. RabbitMQ expires the messages of a queue in order, so a queue that holds messages of different
delays would keep the near behind the far.

The queues are quorum queues, because only they hand over an expired message safely: it is removed when
the queue it goes to has confirmed it. They need RabbitMQ 3.10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dramatiq import Message
from dramatiq.common import current_millis, q_name


@dataclass(frozen=True, slots=True)
class Level:
    """A queue in which every message waits for this long."""

    seconds: int


#: From a minute to about three days, each four times the one before: none is passed more than three times but the last.
LEVELS: Final = tuple(Level(60 * 4**power) for power in range(7))


def level_for(message: Message[Any]) -> Level | None:
    """The longest level that ends before the message is due; none within the last minute, or without a delay."""
    eta = message.options.get("eta")
    if message.queue_name == q_name(message.queue_name) or not isinstance(eta, int | float):
        return None
    left_ms = eta - current_millis()  # not divided: a huge one would be no float
    passed = (level for level in LEVELS if level.seconds * 1000 < left_ms)
    return max(passed, key=lambda level: level.seconds, default=None)


def level_queue(delay_queue: str, level: Level) -> str:
    """The name in RabbitMQ of a level of this delay queue."""
    return f"{delay_queue}.{level.seconds}s"


def level_queues(delay_queue: str) -> list[str]:
    """The names in RabbitMQ of all levels of this delay queue, whether they are there or not."""
    return [level_queue(delay_queue, level) for level in LEVELS]


def declare(channel: Any, delay_queue: str, level: Level) -> None:
    """Make the level of a delay queue in RabbitMQ, unless it is there."""
    channel.queue_declare(
        level_queue(delay_queue, level),
        durable=True,
        arguments={
            "x-queue-type": "quorum",
            "x-message-ttl": level.seconds * 1000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": delay_queue,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",  # the strategy asks for it
        },
    )
