"""Messages sent after a message: callbacks, pipe targets, group callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Callbacks, GroupCallbacks
from dramatiq.rate_limits.backends import RedisBackend
from redis.crc import key_slot

from housekeeping import Settings, install
from tests.faults import exchanges, lose_connection, once, redis_fault
from tests.integration.middleware import applications
from tests.integration.middleware.applications import eventually, queued, working
from tests.integration.middleware.step_worker import StepWorker, delivered_again
from tests.internals.brokers import Requeue, redis_broker
from tests.internals.core import shared_redis
from tests.internals.embedded import embedded
from tests.internals.middleware import retries

pytestmark = pytest.mark.redis_broker_only(reason="Redis is what goes away and comes back")


@pytest.fixture
def closing() -> Iterator[None]:
    """Close the brokers that the test opened."""
    yield
    applications.close_all()


@contextmanager
def counting_by(client: redis.Redis, settings: Settings) -> Iterator[RedisBroker]:
    """Return an application's broker whose group callbacks count with this client."""
    without = settings.model_copy(update={"database_url": None})
    broker = redis_broker(without)
    broker.add_middleware(GroupCallbacks(RedisBackend(client=client), barrier_ttl=60_000))
    install(broker, without, workers=False)
    try:
        yield broker
    finally:
        for each in (broker.client, shared_redis.get()):
            each.connection_pool.disconnect()


@pytest.fixture
def grouped(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    with counting_by(redis_client, settings) as broker:
        yield broker


@pytest.fixture
def refused(settings: Settings) -> Iterator[RedisBroker]:
    """Return a broker as in `grouped`, with a Redis user that may not run scripts."""
    with embedded.start(postgres=False) as servers, redis.Redis.from_url(servers.redis_url) as allowed:
        allowed.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "+@all", "-@scripting")
        with (
            redis.Redis.from_url(servers.redis_url, username="limited", password="secret") as limited,
            counting_by(limited, settings.model_copy(update={"redis_url": servers.redis_url})) as broker,
        ):
            yield broker


@pytest.fixture
def never_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if it waits for the broker."""
    monkeypatch.setattr(retries, "time", SimpleNamespace(sleep=lambda _: pytest.fail("it waits")))


def piped(first: Actor[..., Any], then: Actor[..., Any]) -> None:
    dramatiq.pipeline([first.message(), then.message()], broker=first.broker).run()


@pytest.mark.usefixtures("closing")
@pytest.mark.parametrize(
    ("send", "fails"),
    [
        pytest.param(piped, False, id="pipe_target"),
        pytest.param(
            lambda first, then: first.send_with_options(on_success="then"),
            False,
            id="on_success",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda first, then: first.send_with_options(max_retries=0, on_failure="then"),
            True,
            id="on_failure",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda first, then: first.send_with_options(max_retries=0, on_retry_exhausted="then"),
            True,
            id="on_retry_exhausted",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_follow_up_waits_for_redis(  # R4
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


@pytest.mark.slow
def test_group_whose_count_gets_no_answer_completes_once(  # R4
    grouped: RedisBroker,
) -> None:
    step_worker = StepWorker(grouped)
    ended: list[int] = []
    member = dramatiq.actor(broker=grouped, actor_name="member")(lambda: None)
    over = dramatiq.actor(broker=grouped, actor_name="over")(lambda: ended.append(1))
    group = dramatiq.group([member.message(), member.message()], broker=grouped)
    group.add_completion_callback(over.message())
    group.run()
    with redis_fault("@counted", "after", once(lose_connection)):
        step_worker.run()
    after_one = [message.actor_name for message in queued(grouped)]
    with redis_fault("@counted", "after", once(lose_connection)):
        step_worker.run()

    assert after_one == ["member"]
    assert [message.actor_name for message in queued(grouped)] == ["over"]
    step_worker.run()
    assert ended == [1]


def test_group_member_delivered_twice_counts_once(grouped: RedisBroker) -> None:  # R4, F10
    step_worker = StepWorker(grouped)
    member = dramatiq.actor(broker=grouped, actor_name="member")(lambda: None)
    over = dramatiq.actor(broker=grouped, actor_name="over")(lambda: None)
    group = dramatiq.group([member.message(), member.message()], broker=grouped)
    group.add_completion_callback(over.message())
    group.run()

    first = step_worker.run()
    step_worker.run(delivered_again(first))

    assert [message.actor_name for message in queued(grouped)] == ["member"]


@pytest.mark.parametrize("error", [Requeue("not now", timedelta(minutes=5)), dramatiq.middleware.Shutdown()])
def test_requeued_message_sends_no_callback_yet(  # R5, L4
    broker: RedisBroker, step_worker: StepWorker, error: BaseException
) -> None:
    def raises() -> None:
        raise error

    actor = dramatiq.actor(broker=broker, actor_name="raises", on_failure="told")(raises)
    dramatiq.actor(broker=broker, actor_name="told")(lambda message, error: None)
    actor.send()

    step_worker.run()

    assert {message.actor_name for message in queued(broker) + queued(broker, "default.DQ")} == {"raises"}


def test_unserializable_result_makes_a_dead_letter_not_a_lost_pipeline(  # R4
    broker: RedisBroker, step_worker: StepWorker
) -> None:
    first = dramatiq.actor(broker=broker, actor_name="first")(lambda: object())
    then = dramatiq.actor(broker=broker, actor_name="then")(lambda result: None)
    piped(first, then)

    step_worker.run()

    assert queued(broker) == []
    [dead] = queued(broker, "default.XQ")
    assert dead.actor_name == "first"
    assert "TypeError" in dead.options["traceback"], "R6: it says what it died of"


def test_unsendable_group_callback_makes_a_dead_letter(  # R4
    grouped: RedisBroker,
) -> None:
    member = dramatiq.actor(broker=grouped, actor_name="member")(lambda: None)
    over = dramatiq.actor(broker=grouped, actor_name="over")(lambda: None)
    group = dramatiq.group([member.message()], broker=grouped)
    group.add_completion_callback(over.message_with_options(idempotency_key="of an actor that is not idempotent"))
    group.run()

    StepWorker(grouped).run()

    [dead] = queued(grouped, "default.XQ")
    assert dead.actor_name == "member"
    assert "idempotency_key needs" in dead.options["traceback"]


def test_group_count_refused_by_redis_makes_a_dead_letter(  # R4
    refused: RedisBroker, never_waiting: None
) -> None:
    member = dramatiq.actor(broker=refused, actor_name="member")(lambda: None)
    group = dramatiq.group([member.message()], broker=refused)
    group.add_completion_callback(member.message())
    group.run()

    StepWorker(refused).run()

    [dead] = queued(refused, "default.XQ")
    assert "NoPermissionError" in dead.options["traceback"]


def test_group_keys_are_in_one_cluster_slot(grouped: RedisBroker) -> None:
    member = dramatiq.actor(broker=grouped, actor_name="member")(lambda: None)
    group = dramatiq.group([member.message()], broker=grouped)
    group.add_completion_callback(member.message())
    group.run()

    with exchanges() as made:
        StepWorker(grouped).run()

    [command, *_] = [each for each in made.commands if b"@counted" in each]
    keys = command.split(b"\r\n")[8:12:2]  # after EVALSHA, its digest and their number
    assert keys[1].endswith(b"@counted")
    assert len({key_slot(key) for key in keys}) == 1


def test_custom_callbacks_middleware_keeps_its_class(settings: Settings, redis_client: redis.Redis) -> None:  # R4
    class Own(Callbacks):
        """Subclass with parameters of its own."""

    broker = redis_broker(settings)
    own = Own()
    broker.add_middleware(own)

    install(broker, settings.model_copy(update={"database_url": None}), workers=False)

    assert [each for each in broker.middleware if isinstance(each, Callbacks)] == [own]
    applications.close_all()
    broker.client.connection_pool.disconnect()
    shared_redis.get().connection_pool.disconnect()
