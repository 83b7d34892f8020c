"""Delivery of messages by RabbitMQ."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import dramatiq
import pytest
from dramatiq import Message
from dramatiq.errors import ConnectionClosed

from housekeeping import Settings
from tests.integration.brokers.rabbitmq.conftest import cut, running
from tests.integration.middleware.applications import PATIENCE_S, eventually, queued, working
from tests.internals.brokers import LEVELS, delay_queues, level_queue, queue_lengths
from tests.rabbitmq_look import bodies

HOURS_MS = 3 * 3_600_000


@pytest.mark.parametrize("priority", ["a", 256, -1, True, []])
def test_retry_of_a_message_with_an_invalid_priority_affects_no_other(broker: Any, priority: object) -> None:  # B3
    ran: list[int] = []

    @dramatiq.actor(broker=broker, max_retries=1, min_backoff=10)
    def fragile(number: int) -> None:
        ran.append(number)
        if ran == [1]:
            raise RuntimeError

    sent = fragile.message_with_options(args=(1,), broker_priority=priority)
    broker.declare_queue("default", ensure=True)
    broker.channel.basic_publish("", broker.physical("default"), sent.encode())
    with working(broker):
        eventually(lambda: ran == [1, 1])
        fragile.send(2)
        eventually(lambda: ran == [1, 1, 2])


def test_message_of_a_lost_connection_acknowledges_no_other(broker: Any) -> None:  # B1
    work = dramatiq.actor(broker=broker, actor_name="work")(lambda number: None)
    work.send(1)
    before = broker.consume("default", prefetch=5, timeout=5000)
    at_work = next(before)
    work.send(2)
    cut(before.connection)
    after = broker.consume("default", prefetch=5, timeout=5000)
    assert {next(after).args, next(after).args} == {(1,), (2,)}

    after.ack(at_work)
    after.close()
    with suppress(ConnectionClosed):
        before.close()

    assert sorted(message.args for message in queued(broker)) == [(1,), (2,)]


def test_running_message_whose_connection_is_lost_has_one_effect(broker: Any, quick: None) -> None:  # I2
    effects: list[int] = []
    began, may_end = threading.Event(), threading.Event()

    @dramatiq.actor(broker=broker, idempotent=True)
    def long() -> None:
        began.set()
        assert may_end.wait(PATIENCE_S)
        effects.append(1)

    long.send()
    with working(broker, threads=2) as worker:
        assert began.wait(PATIENCE_S)
        consumer: Any = worker.consumers["default"].consumer
        cut(consumer.connection)
        # Its second delivery waits among the delayed messages.
        eventually(lambda: running(broker, "default.DQ"))
        may_end.set()
        eventually(lambda: not queued(broker) and not queued(broker, "default.DQ"))

    assert effects == [1]


def test_worker_does_not_hold_delayed_messages_for_long(broker: Any, settings: Settings) -> None:
    # RabbitMQ closes the channel of a consumer that holds a message for half an hour.
    work = dramatiq.actor(broker=broker, actor_name="work")(lambda: None)
    eta = int(time.time() * 1000) + HOURS_MS
    far = Message("default.DQ", "work", (), {}, {"eta": eta}).encode()
    broker.declare_queue("default", ensure=True)
    broker.channel.basic_publish("", broker.physical("default.DQ"), far)
    work.send_with_options(delay=HOURS_MS)
    level = level_queue("default.DQ", LEVELS[3])

    with working(broker):
        eventually(lambda: len(bodies(broker, level)) == 2)
        assert running(broker, "default.DQ") == []

    assert queue_lengths(settings, ["default"])["default"].delayed == 2


def test_far_message_does_not_delay_a_near_one(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dramatiq.worker.DELAY_QUEUE_PREFETCH", 1)
    ran = threading.Event()

    @dramatiq.actor(broker=broker)
    def work(number: int) -> None:
        ran.set()

    for _ in range(3):
        work.send_with_options(args=(0,), delay=HOURS_MS)
    work.send_with_options(args=(1,), delay=100)
    with working(broker):
        assert ran.wait(PATIENCE_S)


def test_message_moves_from_level_to_level_until_it_is_due(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay_queues, "LEVELS", (1,))
    at: list[float] = []

    @dramatiq.actor(broker=broker)
    def work() -> None:
        at.append(time.time())

    sent = time.time()
    work.send_with_options(delay=2_500)
    waited = len(bodies(broker, "default.DQ"))
    with working(broker):
        eventually(lambda: at)

    assert (waited, at[0] - sent >= 2.5) == (1, True)


@pytest.mark.parametrize(
    ("left_s", "level_s"),
    [(0, None), (60, None), (61, 60), (240, 60), (241, 240), (345_600, 245_760), (10**7, 245_760)],
)
def test_level_ends_before_its_messages_are_due(left_s: int, level_s: int | None) -> None:
    eta = int(time.time() * 1000) + left_s * 1000 + 500 * (left_s % 60 == 1)
    message: Message[Any] = Message("default.DQ", "work", (), {}, {"eta": eta})

    assert delay_queues.level_for(message) == level_s


@pytest.mark.parametrize("eta", [10**400, float("inf")], ids=["huge", "infinite"])
def test_message_that_is_never_due_waits_in_the_longest_level(eta: float) -> None:  # B3
    message: Message[Any] = Message("default.DQ", "work", (), {}, {"eta": eta})

    assert delay_queues.level_for(message) == LEVELS[-1]
