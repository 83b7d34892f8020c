"""Prefetch and heartbeats of the Redis broker, and messages that only Redis holds."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta

import dramatiq
import pytest
import redis
from dramatiq import Message
from dramatiq.brokers.redis import MAINTENANCE_SCALE, RedisBroker

from housekeeping import Settings, enqueue_many, install
from tests.integration.middleware.applications import PATIENCE_S, eventually, installed, working
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.brokers import redis as redis_broker
from tests.internals.core import shared_redis


def put(broker: RedisBroker, redis_id: str, body: bytes) -> None:
    broker.do_enqueue("default", redis_id, body)


def of_queue(queue: str, **options: object) -> bytes:
    return Message(queue_name=queue, actor_name="good", args=(), kwargs={}, options=dict(options)).encode()


def test_unreadable_message_affects_no_other_on_an_applications_broker(  # B3
    settings: Settings, redis_client: redis.Redis
) -> None:
    own = RedisBroker(client=redis_client, namespace=f"{settings.namespace}:own", middleware=[])
    install(own, settings.model_copy(update={"database_url": None}), workers=False)
    ran = []

    @dramatiq.actor(broker=own)
    def good() -> None:
        ran.append(1)

    good.send()
    put(own, "poison", b"{")
    good.send()
    try:
        with working(own):
            eventually(lambda: len(ran) == 2)
    finally:
        shared_redis.get().close()

    assert own.client.hgetall(f"{own.namespace}:default.XQ.msgs") == {b"poison": b"{"}
    assert own.maintenance_chance == MAINTENANCE_SCALE


def test_message_behind_a_long_one_is_left_to_another_process(  # B2
    broker: RedisBroker, settings: Settings
) -> None:
    other = installed(settings.model_copy(update={"database_url": None}))
    may_end = threading.Event()
    ran: list[str] = []

    def declared(on: RedisBroker) -> None:
        @dramatiq.actor(broker=on, actor_name="work")
        def work(what: str) -> None:
            ran.append(what)
            if what == "long":
                assert may_end.wait(3 * PATIENCE_S)

    declared(broker)
    declared(other)
    for what in ("long", "short"):
        broker.enqueue(Message("default", "work", (what,), {}, {}))
    try:
        with working(broker):
            eventually(lambda: "long" in ran)
            with working(other):
                eventually(lambda: "short" in ran)
            may_end.set()
    finally:
        may_end.set()

    assert ran == ["long", "short"]


def test_busy_process_is_not_considered_dead(broker: RedisBroker) -> None:  # B1
    work = dramatiq.actor(broker=broker, actor_name="work")(lambda: None)
    work.send()
    consumer = broker.consume("default", prefetch=1, timeout=1)
    assert next(consumer) is not None
    broker.client.delete(f"{broker.namespace}:__heartbeats__")

    assert next(consumer) is None

    assert broker.client.zscore(f"{broker.namespace}:__heartbeats__", broker.broker_id) is not None


@pytest.mark.parametrize("command", ["fetch", "enqueue", "enqueue_many"])
def test_process_whose_clock_is_ahead_requeues_no_running_message(  # B1
    broker: RedisBroker, settings: Settings, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    other = installed(settings.model_copy(update={"database_url": None}))
    actors = [dramatiq.actor(broker=each, actor_name="work")(lambda: None) for each in (broker, other)]
    actors[0].send()
    assert next(broker.consume("default", timeout=1)) is not None

    monkeypatch.setattr("dramatiq.common.time", lambda: time.time() + 120)
    if command == "enqueue":
        actors[1].send()
    elif command == "enqueue_many":
        enqueue_many(actors[1], [()])
    delivered = list(other.do_fetch("default", 9))

    assert len(delivered) == (command != "fetch")


def test_identical_unreadable_messages_are_all_moved(broker: RedisBroker) -> None:  # B3
    @dramatiq.actor(broker=broker)
    def good() -> None: ...

    for number in range(3):
        put(broker, f"poison-{number}", b"{")
    with working(broker):
        eventually(lambda: broker.client.zcard(f"{broker.namespace}:default.XQ") == 3)

    assert broker.client.hlen(f"{broker.namespace}:default.msgs") == 0


def test_message_with_another_ones_id_is_not_repeated_forever(  # B3
    broker: RedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_broker, "HEARTBEAT_TIMEOUT_MS", 1)  # lost deliveries are sought in each pass
    ran: list[str] = []
    dramatiq.actor(broker=broker, actor_name="good")(lambda: ran.append("good"))
    body = of_queue("default", redis_message_id="another")
    put(broker, "poison", body)

    with working(broker):
        eventually(lambda: not broker.client.exists(f"{broker.namespace}:default.msgs"))

    assert (ran, broker.client.hgetall(f"{broker.namespace}:default.XQ.msgs")) == (["good"], {b"poison": body})


@pytest.mark.parametrize(
    "options",
    [
        {"claim": "\ud800"},
        {"deduplication_key": "\ud800"},
        {"deduplication_life": "\ud800"},
        {"idempotency_key": "\ud800"},
        {"group_completion_callbacks": 5},
    ],
)
def test_message_with_an_odd_option_runs_under_its_protections(  # B3, D4
    broker: RedisBroker, settings: Settings, caplog: pytest.LogCaptureFixture, options: dict[str, object]
) -> None:
    leases = f"{settings.namespace}:lease:*"
    held: list[int] = []
    terms = {"key": "good", "ttl": timedelta(minutes=1)}

    @dramatiq.actor(broker=broker, idempotent=True, deduplicate="until_executed", exclusive_lease=terms)
    def good() -> None:
        held.append(len(broker.client.keys(leases)))

    put(broker, "odd", of_queue("default", redis_message_id="odd", **options))
    with working(broker):
        eventually(lambda: not broker.client.exists(f"{broker.namespace}:default.msgs"))

    assert (held, broker.client.keys(leases), broker.client.keys(f"{settings.namespace}:dedup:*")) == ([1], [], [])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("option", ["claim", "database_position"])
def test_due_message_with_an_invalid_option_affects_no_other(broker: RedisBroker, option: str) -> None:  # B3
    ran: list[str] = []
    dramatiq.actor(broker=broker, actor_name="good", idempotent=True)(lambda: ran.append("good"))
    dramatiq.actor(broker=broker, actor_name="other")(lambda: ran.append("other")).send_with_options(delay=1)
    body = of_queue("default.DQ", redis_message_id="poison", eta=0, **{option: "a\0"})
    broker.do_enqueue("default.DQ", "poison", body)

    step_worker = StepWorker(broker)
    step_worker.come_due()
    step_worker.run()
    step_worker.run()

    assert sorted(ran) == ["good", "other"]
