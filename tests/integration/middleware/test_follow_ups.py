"""What is sent after a message: callbacks, pipe targets, the callbacks of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Callbacks, GroupCallbacks
from dramatiq.rate_limits.backends import RedisBackend

from housekeeping import embedded
from housekeeping.brokers import redis_broker
from housekeeping.foundation.redis_client import shared_redis
from housekeeping.foundation.settings import Settings
from housekeeping.foundation.steering import PutBack
from housekeeping.installation import install
from tests.integration.middleware import applications
from tests.integration.middleware.applications import eventually, queued, working
from tests.integration.middleware.hands import Hands, delivered_again

pytestmark = pytest.mark.redis_broker_only(reason="Redis is what goes away and comes back")


@pytest.fixture
def closing() -> Iterator[None]:
    """Closes what a test has opened by itself."""
    yield
    applications.close_all()


@pytest.fixture
def grouped(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    """An application's broker with Dramatiq's callbacks of groups."""
    without = settings.model_copy(update={"database_url": None})
    broker = redis_broker(without)
    broker.add_middleware(GroupCallbacks(RedisBackend(client=broker.client), barrier_ttl=60_000))
    install(broker, without, workers=False)
    yield broker
    for client in (broker.client, shared_redis.get()):
        client.connection_pool.disconnect()


def piped(first: Actor[..., Any], then: Actor[..., Any]) -> None:
    dramatiq.pipeline([first.message(), then.message()], broker=first.broker).run()


@pytest.mark.usefixtures("closing")
@pytest.mark.parametrize(
    ("send", "fails"),
    [
        (piped, False),
        (lambda first, then: first.send_with_options(on_success="then"), False),
        (lambda first, then: first.send_with_options(max_retries=0, on_failure="then"), True),
        (lambda first, then: first.send_with_options(max_retries=0, on_retry_exhausted="then"), True),
    ],
    ids=["pipe_target", "on_success", "on_failure", "on_retry_exhausted"],
)
def test_what_follows_a_message_waits_for_redis(  # R4
    settings: Settings, send: Callable[[Actor[..., Any], Actor[..., Any]], object], fails: bool
) -> None:
    with embedded.start(postgres=False) as servers:
        broker = applications.installed(
            settings.model_copy(update={"redis_url": servers.redis_url, "database_url": None})
        )
        followed: list[tuple[Any, ...]] = []

        @dramatiq.actor(broker=broker)
        def first() -> int:
            servers.stop("redis")
            if fails:
                raise ValueError
            return 7

        @dramatiq.actor(broker=broker)
        def then(*given: Any) -> None:
            followed.append(given)

        send(first, then)
        with working(broker):
            eventually(lambda: not _answers(broker))
            servers.start("redis")
            eventually(lambda: followed)

    assert len(followed) == 1


def _answers(broker: RedisBroker) -> bool:
    try:
        return bool(broker.client.ping())
    except redis.RedisError:
        return False


def test_a_group_whose_count_gets_no_answer_ends_once_all_of_it_is_done(  # R4
    grouped: RedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = Hands(grouped)
    ended: list[int] = []
    member = dramatiq.actor(broker=grouped, actor_name="member")(lambda: None)
    over = dramatiq.actor(broker=grouped, actor_name="over")(lambda: ended.append(1))
    group = dramatiq.group([member.message(), member.message()], broker=grouped)
    group.add_completion_callback(over.message())
    group.run()
    [callbacks] = [each for each in grouped.middleware if isinstance(each, GroupCallbacks)]
    counting: Any = callbacks
    count, asked = counting._count, list[int]()

    def answer_lost_at_first(**given: Any) -> Any:
        answer = count(**given)
        asked.append(answer)
        if len(asked) % 2:
            raise redis.ConnectionError("the answer got lost")
        return answer

    monkeypatch.setattr(counting, "_count", answer_lost_at_first)
    hands.run()
    after_one = [message.actor_name for message in queued(grouped)]
    hands.run()

    assert asked == [0, 0, 1, 1]
    assert after_one == ["member"]
    assert [message.actor_name for message in queued(grouped)] == ["over"]
    hands.run()
    assert ended == [1]


def test_a_member_of_a_group_that_is_delivered_twice_counts_once(grouped: RedisBroker) -> None:  # R4, F10
    hands = Hands(grouped)
    member = dramatiq.actor(broker=grouped, actor_name="member")(lambda: None)
    over = dramatiq.actor(broker=grouped, actor_name="over")(lambda: None)
    group = dramatiq.group([member.message(), member.message()], broker=grouped)
    group.add_completion_callback(over.message())
    group.run()

    first = hands.run()
    hands.run(delivered_again(first))

    assert [message.actor_name for message in queued(grouped)] == ["member"]


@pytest.mark.parametrize("error", [PutBack("not now", timedelta(minutes=5)), dramatiq.middleware.Shutdown()])
def test_a_message_that_goes_back_to_the_queue_has_no_callback_yet(  # R5, L4
    broker: RedisBroker, hands: Hands, error: BaseException
) -> None:
    def raises() -> None:
        raise error

    actor = dramatiq.actor(broker=broker, actor_name="raises", on_failure="told")(raises)
    dramatiq.actor(broker=broker, actor_name="told")(lambda message, error: None)
    actor.send()

    hands.run()

    assert {message.actor_name for message in queued(broker) + queued(broker, "default.DQ")} == {"raises"}


def test_a_result_that_no_message_can_carry_makes_a_dead_letter_not_a_lost_pipeline(  # R4
    broker: RedisBroker, hands: Hands
) -> None:
    first = dramatiq.actor(broker=broker, actor_name="first")(lambda: object())
    then = dramatiq.actor(broker=broker, actor_name="then")(lambda result: None)
    piped(first, then)

    hands.run()

    assert queued(broker) == []
    assert [message.actor_name for message in queued(broker, "default.XQ")] == ["first"]


def test_an_applications_own_callbacks_keep_their_kind(settings: Settings, redis_client: redis.Redis) -> None:  # R4
    class Own(Callbacks):
        """With parameters of its own."""

    broker = redis_broker(settings)
    own = Own()
    broker.add_middleware(own)

    install(broker, settings.model_copy(update={"database_url": None}), workers=False)

    assert [each for each in broker.middleware if isinstance(each, Callbacks)] == [own]
    applications.close_all()
    broker.client.connection_pool.disconnect()
    shared_redis.get().connection_pool.disconnect()
