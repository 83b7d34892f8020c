"""Recovery of messages after a lost connection to Redis: those in memory and those in transit."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.conftest import Urls
from tests.faults import exchanges, once
from tests.integration.middleware.applications import PATIENCE_S, eventually, working
from tests.internals.brokers import redis as redis_broker

FORKING = """
import os, sys, dramatiq
from dramatiq.brokers.redis import RedisBroker
from housekeeping.brokers import harden

broker = RedisBroker(url=sys.argv[1], namespace=sys.argv[2], middleware=[])
harden(broker)
dramatiq.actor(broker=broker, actor_name="work")(lambda: None).send()
if not os.fork():
    os._exit(next(broker.consume("default")) is None)
assert os.wait()[1] == 0
assert next(broker.consume("default", timeout=1)) is None
"""


@pytest.fixture
def cut(quick: None) -> Iterator[set[str]]:
    """Return names of queues whose connection breaks once before the next fetch or, with ``+``, after it."""
    queues: set[str] = set()

    def lose(name: str, error: Exception) -> None:
        if name in queues:
            queues.discard(name)
            raise error

    with exchanges(everywhere=True) as made:
        for queue in ("default", "default.DQ"):
            fetch = ["\r\nfetch\r\n", f"\r\n{queue}\r\n"]
            made.whenever(fetch, "before", partial(lose, queue, redis.ConnectionError("connection lost")))
            made.whenever(fetch, "after", partial(lose, f"{queue}+", redis.TimeoutError("the answer did not come")))
        yield queues


def taken(broker: RedisBroker, queue: str) -> int:
    return int(broker.client.scard(f"{broker.namespace}:__acks__.{broker.broker_id}.{queue}"))


def test_delayed_message_in_memory_outlives_a_lost_connection(broker: RedisBroker, cut: set[str]) -> None:  # R4
    ran = threading.Event()

    @dramatiq.actor(broker=broker)
    def later() -> None:
        ran.set()

    with working(broker):
        later.send_with_options(delay=1000)
        eventually(lambda: taken(broker, "default.DQ"))
        cut.add("default.DQ")
        assert ran.wait(PATIENCE_S)

    assert not cut


def test_delayed_messages_due_during_a_redis_outage_are_kept(  # R4
    broker: RedisBroker, cut: set[str]
) -> None:
    ran: list[int] = []

    @dramatiq.actor(broker=broker)
    def later(number: int) -> None:
        ran.append(number)

    failed: list[str] = []

    def fail(command: str) -> None:
        failed.append(command)
        raise redis.TimeoutError("no answer")

    for number, delay in ((1, 500), (2, 3_600_000), (3, 700)):
        later.send_with_options(args=(number,), delay=delay)
    with exchanges(everywhere=True) as made:
        for command in ("enqueue", "requeue"):
            made.whenever([f"\r\n{command}\r\n"], "before", once(partial(fail, command)))
        with working(broker):
            eventually(lambda: len(ran) == 2)

    assert (sorted(ran), failed) == ([1, 3], ["enqueue", "requeue"])


def test_delivery_lost_in_transit_is_repeated(broker: RedisBroker, cut: set[str]) -> None:  # B1
    ran = threading.Event()

    @dramatiq.actor(broker=broker)
    def work() -> None:
        ran.set()

    cut.add("default+")
    work.send()
    with working(broker):
        assert ran.wait(PATIENCE_S)

    assert not cut


def test_delivery_after_the_client_gave_up_is_repeated(  # B1
    broker: RedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Any] = []
    ran = threading.Event()

    @dramatiq.actor(broker=broker)
    def work() -> None:
        ran.set()

    def answering_nobody_at_first(queue_name: str, count: int) -> list[Any]:
        fetched: list[Any] = broker._dispatch("fetch")(queue_name, count)
        if late or not fetched:
            return fetched
        late.extend(fetched)
        return []

    monkeypatch.setattr(broker, "do_fetch", answering_nobody_at_first, raising=False)
    monkeypatch.setattr(redis_broker, "HEARTBEAT_TIMEOUT_MS", 500)
    work.send()
    with working(broker):
        assert ran.wait(PATIENCE_S)

    assert (len(late), taken(broker, "default")) == (1, 0)


def test_running_message_is_not_considered_lost(broker: RedisBroker, cut: set[str]) -> None:  # B1
    runs: list[str] = []
    may_end = threading.Event()

    @dramatiq.actor(broker=broker)
    def long() -> None:
        runs.append("long")
        assert may_end.wait(PATIENCE_S)

    @dramatiq.actor(broker=broker)
    def other() -> None:
        runs.append("other")

    long.send()
    with working(broker, threads=2):
        eventually(lambda: runs)
        cut.add("default")
        eventually(lambda: not cut)
        # Once this one has run, the consumer has reconnected and searched for lost deliveries.
        other.send()
        eventually(lambda: "other" in runs)
        may_end.set()
        eventually(lambda: not taken(broker, "default"))

    assert runs == ["long", "other"]


def test_message_of_a_process_forked_with_the_broker_is_not_considered_lost(  # B1
    urls: Urls, settings: Settings, redis_client: redis.Redis
) -> None:
    forking = [sys.executable, "-c", FORKING, urls.redis, f"{settings.namespace}:own"]

    ended = subprocess.run(forking, capture_output=True, text=True, timeout=60)

    assert ended.returncode == 0, ended.stderr
