"""Parts of `housekeeping.brokers` that tests use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from housekeeping.brokers import dead_letters as models
from housekeeping.brokers import dead_letters_of, dramatiq_internals, harden, message_broker, queue_lengths, redis
from housekeeping.brokers import rabbitmq as broker
from housekeeping.brokers import rabbitmq as delay_queues
from housekeeping.brokers.dead_letters import (
    DeadLetter,
    DeadLetterStore,
    LetterAction,
    LetterFilter,
    LetterPosition,
    LetterResult,
    apply,
    as_new,
    describe_choice,
    find,
    found,
    readable,
    search,
    without_secrets,
)
from housekeeping.brokers.dramatiq_internals import (
    InvalidOption,
    Prefetch,
    Requeue,
    Skip,
    SkipEnqueue,
    StoreUnavailable,
)
from housekeeping.brokers.rabbitmq import (
    LEVELS,
    QueueDeclaredOtherwise,
    ReliableConsumer,
    ReliableRabbitmqBroker,
    close_connection,
    level_queue,
    level_queues,
)
from housekeeping.brokers.redis import DEAD_MESSAGE_TTL_MS, RedisDeadLetters, ReliableRedisBroker, redis_broker


def newest(store: DeadLetterStore, limit: int) -> list[DeadLetter]:
    """Return the newest dead letters of all queues."""
    return list(islice(store.newest_first(), limit))


def requeue(store: DeadLetterStore, ids: Sequence[str]) -> list[LetterResult]:
    """Requeue the dead letters with these ids."""
    return list(store.change_each("requeue", readable(found(store, ids))))
