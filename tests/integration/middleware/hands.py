"""A worker whose every step is taken by the test: Dramatiq's own code on a real queue, in the test's own thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import PriorityQueue
from typing import Any

import pytest
import redis
from dramatiq import Message, MessageProxy
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import dq_name
from dramatiq.worker import ConsumerThread, WorkerThread

from housekeeping.brokers import redis_broker
from housekeeping.foundation.redis_client import shared_redis
from housekeeping.foundation.settings import Settings
from housekeeping.installation import install


@contextmanager
def installed(settings: Settings) -> Iterator[RedisBroker]:
    """A broker with the library's middleware and no database."""
    without = settings.model_copy(update={"database_url": None})
    broker = redis_broker(without)
    install(broker, without, workers=False)
    ours = shared_redis.get()
    yield broker
    for client in (broker.client, ours):
        client.connection_pool.disconnect()


class Hands:
    """Takes messages from a queue and processes them, one by one, when the test says so."""

    def __init__(self, broker: RedisBroker, queue: str = "default") -> None:
        self._broker = broker
        self._work: PriorityQueue[Any] = PriorityQueue()
        self._now = self._consumer(queue)
        self._later = self._consumer(dq_name(queue))
        self._worker = WorkerThread(
            broker=broker, consumers={queue: self._now}, work_queue=self._work, worker_timeout=20
        )

    def fetch(self) -> MessageProxy | None:
        """The next message that waits to start."""
        message: MessageProxy | None = next(iter(self._now.consumer or ()))
        return message

    def run(self, message: MessageProxy | None = None) -> MessageProxy:
        """Process the next message, or this one, up to its acknowledgement."""
        message = message or self.fetch()
        assert message is not None, "no message waits to start"
        self._work.put(0)
        self._worker.process_message(message)
        return message

    def come_due(self) -> None:
        """End the delays of all delayed messages."""
        while (message := next(iter(self._later.consumer or ()))) is not None:
            message.options["eta"] = 0
            self._later.handle_message(message)
        self._later.handle_delayed_messages()

    def _consumer(self, queue: str) -> ConsumerThread:
        thread = ConsumerThread(
            broker=self._broker, queue_name=queue, prefetch=100, work_queue=self._work, worker_timeout=20
        )
        thread.consumer = self._broker.consume(queue, prefetch=100, timeout=1)
        return thread


def delivered_again(message: MessageProxy) -> MessageProxy:
    """The message as the broker delivers it a second time."""
    return MessageProxy(Message.decode(message.encode()))


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch, part: str) -> Iterator[list[str]]:
    """The commands sent to Redis meanwhile for keys that contain `part`."""
    commands: list[str] = []
    execute = redis.Redis.execute_command

    def count(self: redis.Redis, *args: Any, **options: Any) -> Any:
        if any(part in str(arg) for arg in args):
            commands.append(str(args[0]))
        return execute(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(redis.Redis, "execute_command", count)
        yield commands
