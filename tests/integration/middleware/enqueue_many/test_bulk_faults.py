"""Atomicity of bulk enqueue when senders die or answers are lost (D6), on every kind of broker."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker

from housekeeping import Settings, enqueue_many, install
from tests.faults import Crash, crash, exchanges, redis_fault
from tests.integration.middleware.applications import close_all, installed, queued
from tests.integration.middleware.enqueue_many.bulked import actor_of, keys
from tests.internals.brokers import StoreUnavailable
from tests.internals.embedded import embedded

pytestmark = pytest.mark.redis_broker_only(reason="it is about messages and keys in one transaction of Redis")


def test_bulk_sender_killed_anywhere_leaves_all_messages_and_keys_or_none(
    broker: RedisBroker, settings: Settings
) -> None:  # D6, F5
    work = actor_of(broker)
    enqueue_many(work, [0])
    with exchanges() as made:
        enqueue_many(work, [1])
    exchanged = made.total

    for number in range(1, exchanged + 1):
        with exchanges() as made, pytest.raises(Crash):
            made.at(number, "before", crash)
            enqueue_many(work, range(100))
        assert len(keys(broker, settings)) == len(queued(broker)) == 2
    with redis_fault("enqueue", "after", crash), pytest.raises(Crash):
        enqueue_many(work, range(100))
    assert len(keys(broker, settings)) == len(queued(broker)) == 100
    assert min(keys(broker, settings).values()) > 3_000_000

    enqueue_many(work, range(200))
    assert len(queued(broker)) == 200


def test_bulk_repeated_after_a_lost_answer_is_enqueued_once(broker: RedisBroker) -> None:  # D6
    work = actor_of(broker)

    with redis_fault("enqueue", "after"), pytest.raises(StoreUnavailable):
        enqueue_many(work, range(50))
    messages = enqueue_many(work, range(50))

    assert len(queued(broker)) == 50
    assert all("duplicate_of" in message.options for message in messages)


def test_connection_broken_half_way_leaves_neither_messages_nor_keys(
    broker: RedisBroker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:  # D6
    work = actor_of(broker)
    enqueue_many(work, ["scripts are loaded", "for many, too"])
    send = redis.connection.Connection.send_packed_command

    def break_off(self: redis.connection.Connection, command: list[bytes], **options: Any) -> None:
        packed = b"".join(command)
        if b"enqueue" not in packed:
            send(self, command, **options)
            return
        self.connect()
        self._sock.sendall(packed[: len(packed) // 2])  # type: ignore[attr-defined]
        raise redis.ConnectionError("cut")

    for kind in (redis.connection.Connection, redis.connection.UnixDomainSocketConnection):
        monkeypatch.setattr(kind, "send_packed_command", break_off)
    with pytest.raises(StoreUnavailable, match="cut"):
        enqueue_many(work, range(100))
    monkeypatch.undo()

    assert len(queued(broker)) == 2
    assert len(keys(broker, settings)) == 2


def test_unavailable_redis_raises_and_enqueues_nothing(settings: Settings) -> None:
    with embedded.start(postgres=False) as servers:
        broker = installed(settings.model_copy(update={"redis_url": servers.redis_url, "database_url": None}))
        work = actor_of(broker)
        plain = dramatiq.actor(broker=broker, actor_name="plain")(lambda: None)
        servers.stop("redis")

        with pytest.raises(StoreUnavailable, match="Redis did not answer"):
            enqueue_many(work, [1])
        with pytest.raises(redis.ConnectionError):
            enqueue_many(plain, [()])
    close_all()


def test_keys_on_a_separate_redis_are_confirmed_there(settings: Settings, redis_client: redis.Redis) -> None:
    with embedded.start(postgres=False) as servers:
        update = {"broker_url": servers.redis_url, "database_url": None}
        broker = installed(settings.model_copy(update=update))

        enqueue_many(actor_of(broker), [1, 2])

        assert len(queued(broker)) == 2
        left = [redis_client.pttl(key) for key in redis_client.scan_iter(match=f"{settings.namespace}:dedup:*")]
        assert len(left) == 2
        assert all(ms > 5_000 for ms in left)
    close_all()


def test_other_brokers_get_each_message_singly(settings: Settings, redis_client: redis.Redis) -> None:
    broker = StubBroker()
    install(broker, settings.model_copy(update={"database_url": None}), workers=False)
    work = actor_of(broker)
    work.send(1)

    messages = enqueue_many(work, [1, 2])

    assert ["duplicate_of" in message.options for message in messages] == [True, False]
    assert broker.queues["default"].qsize() == 2
    broker.close()
    close_all()


def test_broker_with_custom_enqueue_keeps_it(settings: Settings, redis_client: redis.Redis) -> None:
    seen: list[tuple[Any, ...]] = []

    class Own(RedisBroker):
        def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
            seen.append(message.args)
            return super().enqueue(message, delay=delay)

    broker = Own(client=redis_client, namespace=f"{settings.namespace}:broker")
    install(broker, settings.model_copy(update={"database_url": None}), workers=False)

    enqueue_many(actor_of(broker), [1, 2])

    assert seen == [(1,), (2,)]
    close_all()
