"""Worker that runs step by step in the test's thread: Dramatiq's own code on a real queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import PriorityQueue
from typing import Any

from dramatiq import Message, MessageProxy
from dramatiq.common import dq_name
from dramatiq.worker import ConsumerThread, WorkerThread

from housekeeping import Settings, install
from tests.faults import exchanges
from tests.internals.brokers import message_broker
from tests.internals.core import shared_redis
from tests.rabbitmq_look import Pulling, end_delays, on_rabbitmq, remove, watched

_pulling: list[Pulling] = []


@contextmanager
def installed(settings: Settings) -> Iterator[Any]:
    """Yield the configured broker with the library's middleware and no database; remove it after the block."""
    without = settings.model_copy(update={"database_url": None})
    broker: Any = message_broker(without)
    install(broker, without, workers=False)
    ours = shared_redis.get()
    if on_rabbitmq(broker):
        broker.client = ours  # the client of the keys
        watched(broker)
    try:
        yield broker
    finally:
        close(broker)
        ours.connection_pool.disconnect()


def close(broker: Any) -> None:
    """Close the broker's connections; on RabbitMQ delete its queues as well."""
    while _pulling:
        _pulling.pop().close()
    if on_rabbitmq(broker):
        remove(broker)
    else:
        broker.client.connection_pool.disconnect()


class StepWorker:
    """Worker that takes and processes messages one by one, when the test calls it."""

    def __init__(self, broker: Any, queue: str = "default") -> None:
        self._broker = broker
        self._queue = queue
        self._work: PriorityQueue[Any] = PriorityQueue()
        self._now = self._consumer(queue)
        self._later = self._consumer(dq_name(queue))
        self._worker = WorkerThread(
            broker=broker, consumers={queue: self._now}, work_queue=self._work, worker_timeout=20
        )

    def fetch(self) -> MessageProxy | None:
        """Return the next message that waits to start."""
        return _next(self._now)

    def take(self) -> MessageProxy:
        """Return the next message that waits to start; there has to be one."""
        message = self.fetch()
        assert message is not None, "no message waits to start"
        return message

    def run(self, message: MessageProxy | None = None) -> MessageProxy:
        """Process this message or the next one, including its acknowledgement."""
        message = message or self.take()
        self._work.put(0)
        self._worker.process_message(message)
        return message

    def come_due(self) -> None:
        """End the delays of all delayed messages."""
        if on_rabbitmq(self._broker):
            end_delays(self._broker, self._queue)
        while (message := _next(self._later)) is not None:
            message.options["eta"] = 0
            self._later.handle_message(message)
        self._later.handle_delayed_messages()

    def _consumer(self, queue: str) -> ConsumerThread:
        thread = ConsumerThread(
            broker=self._broker, queue_name=queue, prefetch=100, work_queue=self._work, worker_timeout=20
        )
        if on_rabbitmq(self._broker):
            # RabbitMQ pushes messages at once; a test reads the queue when it wants to.
            _pulling.append(Pulling(self._broker, queue))
            thread.consumer = _pulling[-1]
        else:
            thread.consumer = self._broker.consume(queue, prefetch=100, timeout=1)
        return thread


def _next(thread: ConsumerThread) -> MessageProxy | None:
    message: MessageProxy | None = next(iter(thread.consumer or ()))
    return message


def delivered_again(message: MessageProxy) -> MessageProxy:
    """Return the message as the broker delivers it a second time."""
    return MessageProxy(Message.decode(message.encode()))


@contextmanager
def counting(part: str) -> Iterator[list[str]]:
    """Count the commands sent to Redis in the block that contain `part`."""
    commands: list[str] = []
    with exchanges(everywhere=True) as made:
        yield commands
    commands += [each.split(b"\r\n")[2].decode() for each in made.commands if part.encode() in each]
