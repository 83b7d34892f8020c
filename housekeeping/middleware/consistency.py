"""Data consistency: a message reads from a replica that has caught up with its sender, or from the primary.

Worker threads have one database connection each, clean at the start of every message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import redis
from dramatiq import Broker, Message, MessageProxy, Middleware
from dramatiq.common import current_millis
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from housekeeping.brokers.dramatiq_internals import Requeue
from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.redis import text, translate_redis_errors
from housekeeping.core.telemetry import current_message
from housekeeping.database.connection import Database, database
from housekeeping.database.replicas import (
    ReadRouting,
    Replica,
    ReplicaChoice,
    Replicas,
    WalPosition,
    WalPositionReader,
    set_read_routing,
)
from housekeeping.middleware.keys import KEY, POSITION, POSITION_REMEMBERED, position_prefix


class Connections(Middleware):
    """Middleware that gives each message a connection without leftovers of the last message.

    A thread keeps its connection from message to message, because opening one costs a hundred times as much as using
    it. A connection that is broken, or that an actor left inside a transaction, is closed, which rolls back.
    """

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        for each in database.by_name().values():
            if each.is_closed():
                continue
            # The status also shows a transaction that peewee did not begin, and a dead server.
            if each.in_transaction() or each.connection().info.transaction_status != TRANSACTION_STATUS_IDLE:
                _close(each)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self.after_process_message(broker, message)


def _close(unusable: Database) -> None:
    while unusable.in_transaction():  # peewee does not close a connection inside a transaction
        unusable.pop_transaction()
    unusable.close()


logger = named_logger(__name__)

#: A message older than this reads from the primary. The positions of its dropped duplicates expire soon after, and the
#: clocks of two hosts may differ.
_OLDEST: Final = POSITION_REMEMBERED / 2
#: Delay of a `delayed` message that is requeued, once: a replica that did not catch up in half a second is busy.
_LATER: Final = timedelta(seconds=5)
#: The message option of a message that was requeued for a replica.
_WAITED: Final = "waited_for_replica"


class _ThreadState(threading.local):
    many = False
    shared: WalPosition | None = None  # the position of all messages in `sending_many`


class DataConsistency(Middleware):
    """Middleware that lets messages of actors that opt in read from replicas.

    ::

        @dramatiq.actor(data_consistency="sticky")
        def remind(user_id: int) -> None:
            unread = Notification.select().where(Notification.user_id == user_id).count(housekeeping.read_database())

    A message of a ``sticky`` or ``delayed`` actor carries the position of the primary's log at the time it was sent. If
    duplicates of it were dropped, the newest position counts. A ``delayed`` message is requeued once, before it starts,
    if all replicas lag.

    Parameters:
      client, namespace: Of the Redis in which deduplication remembers the positions of dropped duplicates.
      positions: Reads the positions that messages carry, which are those of the database ``main``.
      replicas: Replicas of ``main``.
      others: Replicas of the other databases by name. They must have replayed the position at the time of the message's
        first read, which is later than the sender's.
    """

    def __init__(
        self,
        client: redis.Redis,
        namespace: str,
        positions: WalPositionReader,
        replicas: Replicas,
        others: Mapping[str, tuple[WalPositionReader, Replicas]] = MappingProxyType({}),
    ) -> None:
        self._client = client
        self._prefix = position_prefix(namespace)
        self._positions = positions
        self._replicas = replicas
        self._others = others
        self._has_replicas = bool(replicas or others)
        self._thread = _ThreadState()

    @contextmanager
    def sending_many(self) -> Iterator[None]:
        """Query one position for all messages that this thread sends in the block.

        Commit nothing in the block that its messages must see.
        """
        if self._thread.many:
            yield
            return
        self._thread.many = True
        try:
            yield
        finally:
            self._thread.many, self._thread.shared = False, None

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        # A message that goes back into the queue keeps its position, which covers what its sender saw.
        if not self._asked_for(broker, message) or not self._replicas or POSITION in message.options:
            return
        position = self._thread.shared or self._positions.current()
        if position is not None:
            message.options[POSITION] = str(position)
        if self._thread.many:
            self._thread.shared = position

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        if not self._asked_for(broker, message):
            return
        delayed = broker.get_actor(message.actor_name).options["data_consistency"] == "delayed"
        if delayed and self._replicas and _WAITED not in message.options and self._caught_up(message).lagging:
            message.options[_WAITED] = True
            logger.info("Message requeued, because all replicas lag", job_status="waits_for_replica")
            raise Requeue(f"{message.message_id} waits for a replica", _LATER)
        # The replica is chosen at the first read: most runs need none, and until its run starts a message may still
        # replace duplicates, whose positions count.
        context = current_message.get()
        routings = [ReadRouting(context, partial(self._replica_of, name), name) for name in self._others]
        if self._replicas:
            routings.append(ReadRouting(context, lambda: self._caught_up(message).replica))
        set_read_routing(*routings)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._replicas.close_unusable()
        for _, replicas in self._others.values():
            replicas.close_unusable()

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self.after_process_message(broker, message)

    def _asked_for(self, broker: Broker, message: Message[Any] | MessageProxy) -> bool:
        actor = broker.actors.get(message.actor_name) if self._has_replicas else None
        return actor is not None and actor.options.get("data_consistency") in ("sticky", "delayed")

    def _replica_of(self, name: str) -> Replica | None:
        """Find a replica of another database that has replayed the current position."""
        positions, replicas = self._others[name]
        position = positions.current()
        return None if position is None else replicas.caught_up(position, _pause()).replica

    def _caught_up(self, message: MessageProxy) -> ReplicaChoice:
        """Find a replica that has caught up with the message."""
        position = self._position(message)
        if position is None:
            return ReplicaChoice(None, lagging=False)
        return self._replicas.caught_up(position, _pause())

    def _position(self, message: MessageProxy) -> WalPosition | None:
        """Return the newest position of the message and its dropped duplicates; None if unknown."""
        age = timedelta(milliseconds=current_millis() - message.message_timestamp)
        own, key = WalPosition.parse(message.options.get(POSITION)), message.options.get(KEY)
        if own is None or age > _OLDEST:
            return None
        if key is None:
            return own
        try:
            with translate_redis_errors():
                answer: Any = self._client.get(self._prefix + key)
        except RedisUnavailable as error:
            logger.warning("Message reads from the primary", error=str(error))
            return None
        of_duplicates = WalPosition.parse(text(answer))
        return own if of_duplicates is None else max(own, of_duplicates)


def _pause() -> Callable[[float], object]:
    """Return a function that waits, for a shorter time when the process is asked to stop."""
    context = current_message.get()
    return context.stopping.wait if context else time.sleep
