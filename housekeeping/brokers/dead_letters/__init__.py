"""Messages that a broker has given up: looked at, and sent once more.

::

    store = dead_letters_of(broker)
    for letter in store.newest(20):
        print(letter.id, letter.actor_name, letter.error)
    requeue(store, ["5f0c2a9e-..."])
"""

from __future__ import annotations

from dramatiq import Broker
from dramatiq.brokers.redis import RedisBroker

from housekeeping.brokers.dead_letters.models import DeadLetter, DeadLetterStore, Requeued, found, requeue
from housekeeping.brokers.dead_letters.on_redis import RedisDeadLetters
from housekeeping.core.errors import Refused

__all__ = ["DeadLetter", "DeadLetterStore", "RedisDeadLetters", "Requeued", "dead_letters_of", "found", "requeue"]


def dead_letters_of(broker: Broker) -> DeadLetterStore:
    """The dead letters of a broker that has the library's middleware.

    Raises:
      Refused: When it is of a kind whose dead letters cannot be reached.
    """
    if isinstance(broker, RedisBroker):
        return RedisDeadLetters(broker)
    if hasattr(broker, "bury"):
        from housekeeping.brokers.dead_letters.on_rabbitmq import RabbitmqDeadLetters  # needs pika

        return RabbitmqDeadLetters(broker)
    raise Refused(f"the dead letters of a {type(broker).__name__} cannot be listed")
