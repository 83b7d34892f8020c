"""Heartbeats of a worker in this process: their contents, and that they delay no message."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import dramatiq
import periodiq
import pytest
import redis
from dramatiq import Worker

from housekeeping import Settings
from tests.acceptance.processes import eventually
from tests.faults import at_step, lose_connection
from tests.internals.ledger import BusyThread, Heartbeat, RedisHeartbeats, processes
from tests.internals.middleware import SchedulerHeartbeats, observe

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "INTERVAL", timedelta(seconds=0.05))


@pytest.fixture
def read(redis_client: redis.Redis, settings: Settings) -> Callable[[], list[Heartbeat]]:
    return lambda: [said for _, said in RedisHeartbeats(redis_client, settings.namespace).read().values()]


@contextmanager
def at_work(broker: Any, **more: Any) -> Iterator[Worker]:
    worker = Worker(broker, worker_timeout=20, worker_threads=3, **more)
    broker.emit_after("process_boot")
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def test_heartbeat_names_queues_and_counts_busy_threads(broker: Any, read: Callable[[], list[Heartbeat]]) -> None:
    go_on = threading.Event()

    @dramatiq.actor(broker=broker, queue_name="mails")
    def hold() -> None:
        assert go_on.wait(PATIENCE_S)

    @dramatiq.actor(broker=broker, queue_name="elsewhere")
    def other() -> None: ...

    with at_work(broker, queues={"mails"}):
        hold.send()
        hold.send()
        eventually(lambda: [each.busy for each in read()] == [2])
        [said] = read()
        go_on.set()
        eventually(lambda: [each.busy for each in read()] == [0])

    assert (said.kind, said.queues, said.threads) == ("worker", ["mails"], 3)
    assert [each.stopped for each in read()] == [True]


def test_heartbeat_says_where_a_thread_is_that_hangs(
    broker: Any, read: Callable[[], list[Heartbeat]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LONG_BUSY", timedelta(seconds=0.1))
    go_on = threading.Event()

    @dramatiq.actor(broker=broker)
    def hang() -> None:
        assert go_on.wait(PATIENCE_S)

    with at_work(broker):
        message = hang.send()
        eventually(lambda: [[waits(thread) for thread in each.busy_threads] for each in read()] == [[True]])
        [[thread]] = [each.busy_threads for each in read()]
        go_on.set()
        eventually(lambda: [each.busy_threads for each in read()] == [[]])

    assert (thread.worker, thread.message_id) == ("hang", message.message_id)
    assert thread.busy_s > 0.1 and thread.name


def waits(thread: BusyThread) -> bool:
    return re.fullmatch(r"python3[^/]*/threading\.py:\d+ Condition\.wait", thread.frame) is not None


def test_failed_and_skipped_messages_leave_no_thread_busy(broker: Any, read: Callable[[], list[Heartbeat]]) -> None:
    @dramatiq.actor(broker=broker, max_retries=0)
    def fail() -> None:
        raise RuntimeError

    with at_work(broker) as worker:
        fail.send()
        fail.send_with_options(max_age=-1)
        broker.join("default")
        worker.join()
        eventually(lambda: [each.busy for each in read()] == [0])


def test_unavailable_redis_is_logged_once_and_retried(
    broker: Any,
    read: Callable[[], list[Heartbeat]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    tried, away = threading.Semaphore(0), threading.Event()
    away.set()

    def lose() -> None:
        if away.is_set():
            tried.release()
            lose_connection()

    ran = threading.Event()

    @dramatiq.actor(broker=broker)
    def run() -> None:
        ran.set()

    with at_step(RedisHeartbeats, "write", "before", lose), at_work(broker):
        assert all(tried.acquire(timeout=PATIENCE_S) for _ in range(3))
        run.send()
        assert ran.wait(PATIENCE_S)
        away.clear()
        eventually(lambda: len(read()) == 1)

    said = [line.getMessage() for line in caplog.records if line.name == observe.__name__]
    assert [sum(text in line for line in said) for text in ("cannot be sent", "sent again")] == [1, 1]


def test_process_without_periodiq_is_no_scheduler(
    redis_client: redis.Redis, settings: Settings, read: Callable[[], list[Heartbeat]]
) -> None:
    scheduler = SchedulerHeartbeats(redis_client, settings.namespace)

    scheduler.wake()

    assert scheduler._sender is None
    assert read() == []


def test_scheduler_that_stopped_waking_sends_no_heartbeat(
    redis_client: redis.Redis,
    settings: Settings,
    read: Callable[[], list[Heartbeat]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = SchedulerHeartbeats(redis_client, settings.namespace)

    def main() -> None:
        scheduler.wake()

    monkeypatch.setattr(periodiq, "main", main)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join(PATIENCE_S)
    eventually(lambda: [each.kind for each in read()] == ["scheduler"])
    assert scheduler._sender is not None
    monkeypatch.setattr(observe, "AWAKE", timedelta())
    scheduler._sender.stop()

    assert [each.stopped for each in read()] == [False], "the last one was sent while it was awake"
