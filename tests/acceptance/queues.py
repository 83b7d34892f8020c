"""Queues of a test's processes, filled and read from outside, on either broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from dramatiq import Message

from housekeeping import Settings
from tests.integration.middleware.applications import queued
from tests.integration.middleware.step_worker import close
from tests.internals.brokers import message_broker


class Queues:
    """Queues of a test's processes, through a broker without middleware."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def put(self, queue: str, actor: str, *arguments: object, times: int = 1) -> None:
        """Enqueue one or several equal messages without middleware."""
        self._broker.declare_queue(queue)
        for _ in range(times):
            self._broker.enqueue(Message(queue, actor, arguments, {}, {}))

    def messages(self, queue: str) -> list[Message[Any]]:
        """Return waiting messages, oldest first; with Redis, running ones too."""
        return queued(self._broker, queue)


@pytest.fixture
def queues(settings: Settings) -> Iterator[Queues]:
    """Return the queues of this test's settings; delete those in RabbitMQ after the test."""
    broker = message_broker(settings)
    yield Queues(broker)
    close(broker)
