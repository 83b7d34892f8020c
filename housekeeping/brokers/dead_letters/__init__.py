"""Dead letters: messages that the broker has given up, to be listed, requeued and deleted.

::

    store = dead_letters_of(broker)
    for letter in store.newest(20):
        print(letter.id, letter.actor_name, letter.error)
    requeue(store, ["5f0c2a9e-..."])

`models` defines a dead letter and how it is requeued. `on_redis` and `on_rabbitmq` read and move them. `search` filters
them, and `bulk` requeues or deletes many. `formatting` masks secrets.
"""

from __future__ import annotations

from dramatiq import Broker
from dramatiq.brokers.redis import RedisBroker

from housekeeping.brokers.dead_letters.models import DeadLetter, DeadLetterStore, LetterResult, found, requeue
from housekeeping.brokers.dead_letters.on_redis import RedisDeadLetters
from housekeeping.core.errors import Refused

__all__ = ["DeadLetter", "DeadLetterStore", "RedisDeadLetters", "LetterResult", "dead_letters_of", "found", "requeue"]


def dead_letters_of(broker: Broker) -> DeadLetterStore:
    """Return the dead letters of a broker that has the library's middleware.

    Raises:
      Refused: When the dead letters of this kind of broker cannot be listed.
    """
    if isinstance(broker, RedisBroker):
        return RedisDeadLetters(broker)
    if hasattr(broker, "bury"):
        from housekeeping.brokers.dead_letters.on_rabbitmq import RabbitmqDeadLetters  # needs pika

        return RabbitmqDeadLetters(broker)
    raise Refused(f"the dead letters of a {type(broker).__name__} cannot be listed")
