"""Enqueueing of dropped, foreign and delayed messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import dramatiq
import pytest
import redis
from dramatiq import Broker, Message, Middleware, group
from dramatiq.brokers.redis import RedisBroker

from housekeeping import embedded
from housekeeping.core.middleware_errors import SkipEnqueue
from housekeeping.core.settings import Settings
from tests.integration.middleware.applications import close_all, eventually, installed, queued, working


class Refusing(Middleware):
    """Middleware that refuses messages with this option."""

    def before_enqueue(self, broker: Broker, message: Message[object], delay: int | None) -> None:
        if message.options.get("refuse"):
            raise SkipEnqueue("deduplicated", duplicate_of="the other")


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    broker = installed(settings.model_copy(update={"database_url": None}))
    broker.add_middleware(Refusing())
    yield broker
    close_all()


def test_sender_of_a_duplicate_gets_it_back_marked(broker: RedisBroker) -> None:  # D2
    @dramatiq.actor(broker=broker)
    def work(number: int) -> None: ...

    message = work.send_with_options(args=(1,), refuse=True)

    assert (message.args, message.options["duplicate_of"]) == ((1,), "the other")
    assert queued(broker) == []


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
        assert ran.wait(timeout=20)
        eventually(lambda: [message.actor_name for message in queued(newer, "default.XQ")] == ["gone"])
    close_all()


def test_group_with_a_dropped_message_sends_the_others(broker: RedisBroker) -> None:  # D2
    @dramatiq.actor(broker=broker)
    def work(number: int) -> None: ...

    group([work.message_with_options(args=(n,), refuse=n == 1) for n in range(3)], broker=broker).run()

    assert [message.args for message in queued(broker)] == [(0,), (2,)]


def test_unavailable_redis_raises_for_senders_other_than_the_scheduler(settings: Settings) -> None:  # S3
    with embedded.start(postgres=False) as servers:
        broker = installed(settings.model_copy(update={"redis_url": servers.redis_url, "database_url": None}))

        @dramatiq.actor(broker=broker)
        def work() -> None: ...

        servers.stop("redis")
        with pytest.raises(redis.ConnectionError):
            work.send()
    close_all()
