"""Enqueueing of dropped, foreign and delayed messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import dramatiq
import pytest
import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.integration.middleware.applications import close_all, eventually, installed, queued, working
from tests.internals.embedded import embedded


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    broker = installed(settings.model_copy(update={"database_url": None}))
    yield broker
    close_all()


def test_message_for_another_services_actor_is_enqueued(broker: RedisBroker) -> None:
    broker.enqueue(Message("default", "elsewhere", (1,), {}, {}))

    assert [(message.actor_name, message.args) for message in queued(broker)] == [("elsewhere", (1,))]


def test_delayed_message_of_a_removed_actor_dies_and_blocks_no_other(
    settings: Settings, redis_client: redis.Redis
) -> None:
    former, newer = (installed(settings.model_copy(update={"database_url": None})) for _ in range(2))
    ran = threading.Event()
    dramatiq.actor(broker=former, actor_name="gone")(lambda: None).send_with_options(delay=1)
    work = dramatiq.actor(broker=newer, actor_name="work")(ran.set)
    work.send_with_options(delay=2)

    with working(newer):
        assert ran.wait(timeout=60)
        eventually(lambda: [message.actor_name for message in queued(newer, "default.XQ")] == ["gone"])
    close_all()


def test_unavailable_redis_raises_for_senders_other_than_the_scheduler(settings: Settings) -> None:  # S3
    with embedded.start(postgres=False) as servers:
        broker = installed(settings.model_copy(update={"redis_url": servers.redis_url, "database_url": None}))

        @dramatiq.actor(broker=broker)
        def work() -> None: ...

        servers.stop("redis")
        with pytest.raises(redis.ConnectionError):
            work.send()
        with pytest.raises(redis.ConnectionError):
            work.send_with_options(scheduled_at="an option of the application")
    close_all()
