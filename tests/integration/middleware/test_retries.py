"""Delays of retries, dead letters and retries of scheduled actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Broker, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis
from dramatiq.middleware import TimeLimitExceeded, raise_thread_exception

from housekeeping import Settings
from tests.integration.middleware.applications import close_all, eventually, installed, queued, wake_up, working
from tests.internals.brokers import InvalidOption, Requeue
from tests.internals.database import Database
from tests.internals.embedded import embedded


@pytest.fixture
def broker(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    yield installed(settings)
    close_all()


@pytest.fixture
def closing() -> Iterator[None]:
    """Close the brokers that the test opened."""
    yield
    close_all()


def failing(broker: RedisBroker, error: Exception | None = None, **options: Any) -> dramatiq.Actor[[], None]:
    @dramatiq.actor(broker=broker, actor_name="failing", **options)
    def failing() -> None:
        raise error or ValueError("no")

    return failing


def delay_of_the_retry(broker: RedisBroker, send: Callable[[], Any]) -> timedelta:
    """Send, run once, and return the delay of the retry."""
    began = time.time()
    with working(broker):
        send()
        eventually(lambda: queued(broker, "default.DQ") and not queued(broker))
        [retry] = queued(broker, "default.DQ")
    return timedelta(seconds=retry.options["eta"] / 1000 - began)


def test_first_retry_comes_after_15_seconds(broker: RedisBroker) -> None:  # R1
    delay = delay_of_the_retry(broker, failing(broker).send)

    assert timedelta(seconds=15) <= delay < timedelta(seconds=60)


def test_late_retry_of_a_scheduled_actor_waits_no_longer_than_its_period(  # R1
    broker: RedisBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    actor = failing(broker, schedule="* * * * *")

    delay = delay_of_the_retry(broker, lambda: actor.send_with_options(retries=10))

    assert timedelta(seconds=59) < delay < timedelta(seconds=100)
    [line] = [record for record in caplog.records if "retr" in record.getMessage().lower()]
    assert (vars(line)["delay_s"], vars(line)["retries"]) == (60, 11)


def test_late_retry_of_rediscovered_work_waits_ten_minutes(broker: RedisBroker) -> None:  # R1
    actor = failing(broker, rediscovered=True)

    delay = delay_of_the_retry(broker, lambda: actor.send_with_options(retries=12))

    assert timedelta(seconds=599) < delay < timedelta(minutes=11)


@pytest.mark.parametrize("sooner", [{"schedule": "* * * * *"}, {"rediscovered": True}])
@pytest.mark.parametrize(
    ("options", "error"),
    [({"min_backoff": 3_600_000, "max_backoff": 3_700_000}, None), ({}, dramatiq.Retry(delay=3_700_000))],
)
def test_delays_given_by_the_actor_or_the_exception_win(  # R1
    broker: RedisBroker, options: dict[str, Any], error: Exception | None, sooner: dict[str, Any]
) -> None:
    actor = failing(broker, error, **sooner, **options)

    assert delay_of_the_retry(broker, actor.send) > timedelta(minutes=30)


@pytest.mark.parametrize(("options", "last"), [({}, 25), ({"max_retries": 3}, 3)])
def test_last_failed_retry_makes_a_dead_letter(  # R1
    broker: RedisBroker, options: dict[str, Any], last: int
) -> None:
    actor = failing(broker, **options)
    actor.send_with_options(retries=last - 1)
    actor.send_with_options(retries=last)

    with working(broker):
        eventually(lambda: not queued(broker))

    assert [message.options["retries"] for message in queued(broker, "default.DQ")] == [last]
    assert [message.options["retries"] for message in queued(broker, "default.XQ")] == [last]


def test_scheduled_actor_keeps_its_last_ten_dead_letters(broker: RedisBroker) -> None:  # R1
    @dramatiq.actor(broker=broker, schedule="* * * * *", max_retries=0)
    def scheduled(number: int = 0) -> None:
        raise ValueError

    @dramatiq.actor(broker=broker, max_retries=0)
    def other() -> None:
        raise ValueError

    for number in range(13):
        other.send()
        scheduled.send(number)
    with working(broker):
        eventually(lambda: not queued(broker))

    dead = queued(broker, "default.XQ")
    assert sorted(message.args for message in dead) == [()] * 13 + [(number,) for number in range(3, 13)]
    assert broker.client.zcard(f"{broker.namespace}:default.XQ") == 23


def test_failing_schedule_continues_with_one_waiting_retry(broker: RedisBroker) -> None:  # R2
    runs = []

    @dramatiq.actor(broker=broker, schedule="* * * * *")
    def scheduled() -> None:
        runs.append(1)
        raise ValueError

    first = datetime(2026, 3, 2, 10, tzinfo=UTC)
    with working(broker):
        for minute in range(3):
            wake_up(broker, first + timedelta(minutes=minute))
            eventually(lambda: not queued(broker))

    assert len(runs) == 3
    assert len(queued(broker, "default.DQ")) == 1


def test_failures_pause_a_schedule_for_one_period_at_most(broker: RedisBroker) -> None:  # R2
    actor = failing(broker, schedule="*/5 * * * *", idempotent=True, deduplicate="until_executed")

    delay = delay_of_the_retry(broker, lambda: actor.send_with_options(retries=20))
    tick = actor.send()

    assert "duplicate_of" in tick.options
    assert delay < timedelta(minutes=6)


def test_lost_retry_blocks_others_for_less_than_one_and_a_half_periods(  # R2
    broker: RedisBroker, settings: Settings
) -> None:
    delay_of_the_retry(broker, failing(broker, schedule="* * * * *").send)

    [mark] = broker.client.scan_iter(match=f"{settings.namespace}:retry:*")

    assert 0 < broker.client.pttl(mark) <= 90_000


def test_running_retry_makes_room_for_another(broker: RedisBroker, settings: Settings) -> None:  # R2
    actor = failing(broker, schedule="* * * * *")
    delay_of_the_retry(broker, actor.send)
    [retry] = queued(broker, "default.DQ")
    del retry.options["eta"]
    failed_again = retry.copy(queue_name="default", options={"max_retries": 1})

    with working(broker):
        broker.enqueue(failed_again)
        eventually(lambda: queued(broker, "default.XQ"))

    assert list(broker.client.scan_iter(match=f"{settings.namespace}:retry:*")) == []


@pytest.mark.usefixtures("closing")
def test_retry_waits_for_redis_through_interrupts(  # R4
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with embedded.start(postgres=False) as servers:
        broker = installed(settings.model_copy(update={"redis_url": servers.redis_url, "database_url": None}))
        threads: list[int] = []

        @dramatiq.actor(broker=broker)
        def cut_off() -> None:
            threads.append(threading.get_ident())
            servers.stop("redis")
            raise ValueError

        def waits() -> int:
            return sum("cannot be enqueued yet" in record.getMessage() for record in caplog.records)

        cut_off.send()
        with working(broker):
            eventually(waits)
            raise_thread_exception(threads[0], TimeLimitExceeded)
            so_far = waits()
            eventually(lambda: waits() > so_far + 1)
            servers.start("redis")
            eventually(lambda: queued(broker, "default.DQ"))
            assert len(queued(broker, "default.DQ")) == 1


def test_message_whose_retry_cannot_be_made_is_a_dead_letter(broker: RedisBroker) -> None:  # R4
    def broken(retries: int, error: BaseException) -> bool:
        raise RuntimeError("the predicate itself fails")

    actor = failing(broker, retry_when=broken)
    actor.send()
    with working(broker):
        eventually(lambda: not queued(broker))

    assert len(queued(broker, "default.XQ")) == 1


def test_failed_message_with_an_object_of_a_middleware_is_a_dead_letter(broker: RedisBroker) -> None:  # R4
    class Marking(Middleware):
        def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
            message.options["began_at"] = datetime.now(UTC)  # which cannot be encoded

    broker.add_middleware(Marking())
    sent = failing(broker).send()
    with working(broker):
        eventually(lambda: not queued(broker))

    assert [message.message_id for message in queued(broker, "default.XQ")] == [sent.message_id]


@pytest.mark.parametrize(
    ("option", "value", "right"),
    [
        ("throws", [KeyError], "an exception class, or a tuple of them"),
        ("time_limit", "60000", "a number"),
        ("max_retries", timedelta(1), "a number"),
    ],
)
def test_option_that_breaks_dramatiq_is_refused(broker: RedisBroker, option: str, value: Any, right: str) -> None:
    with pytest.raises(InvalidOption, match=rf"^failing: {option} is .*; it should be {right}$"):
        failing(broker, **{option: value})


def test_requeued_message_uses_no_retry(broker: RedisBroker) -> None:  # R5, L4
    actor = failing(broker, Requeue("not now", timedelta(minutes=5)), max_retries=0)
    actor.send()
    with working(broker):
        eventually(lambda: queued(broker, "default.DQ") and not queued(broker))

    [waiting] = queued(broker, "default.DQ")
    assert "retries" not in waiting.options


def test_message_that_comes_too_early_is_put_back_for_longer(broker: RedisBroker) -> None:
    # The clock of the process that delivered it is 50 minutes ahead.
    actor = failing(broker, Requeue("not now", timedelta(minutes=5)), max_retries=0)
    now = current_millis()
    actor.send_with_options(not_before=now + 3_000_000)
    with working(broker):
        eventually(lambda: queued(broker, "default.DQ") and not queued(broker))

    [waiting] = queued(broker, "default.DQ")
    assert waiting.options["eta"] >= waiting.options["not_before"] == now + 3_300_000


@pytest.mark.parametrize("not_before", ["soon", -1, 10**30, None])
def test_wrong_time_of_an_earlier_delay_delays_by_an_hour_at_most(broker: RedisBroker, not_before: object) -> None:
    actor = failing(broker, Requeue("not now", timedelta(minutes=5)), max_retries=0)
    now = current_millis()
    actor.send_with_options(not_before=not_before)
    with working(broker):
        eventually(lambda: queued(broker, "default.DQ") and not queued(broker))

    [waiting] = queued(broker, "default.DQ")
    assert now + 300_000 <= waiting.options["eta"] < now + 4_000_000


def test_failed_tick_with_dependents_is_retried_beside_a_waiting_retry(broker: RedisBroker) -> None:  # D2, R2
    actor = failing(broker, schedule="*/10 * * * *")
    then = dramatiq.actor(broker=broker, actor_name="then")(lambda: None)

    with working(broker):
        actor.send()
        eventually(lambda: queued(broker, "default.DQ"))
        dramatiq.pipeline([actor.message(), then.message_with_options(pipe_ignore=True)], broker=broker).run()
        eventually(lambda: not queued(broker))

    assert sorted("pipe_target" in retry.options for retry in queued(broker, "default.DQ")) == [False, True]
