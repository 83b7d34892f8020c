"""Firing of ticks by periodiq's scheduler with the library's middleware."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import dramatiq
import periodiq
import pytest
import redis

from housekeeping import Settings
from tests.faults import redis_fault
from tests.integration.middleware.applications import (
    at,
    close_all,
    due,
    eventually,
    installed,
    queued,
    rows,
    scheduler,
    ticks,
    wake_up,
    working,
)
from tests.internals.core import Cron, DeclarationError
from tests.internals.database import Database
from tests.internals.embedded import embedded


@pytest.fixture
def own(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Iterator[Settings]:
    yield settings
    close_all()


def test_tick_seen_by_two_schedulers_fires_once(own: Settings) -> None:  # S1
    one, other = scheduler(own), scheduler(own)
    now = at(10)
    both = [*due(one, now), *due(other, now)]

    for actor in both:
        actor.send_with_options(scheduled_at=str(now))

    assert len(both) == 2
    assert ticks(one) == ["10:00"]


def test_clock_that_steps_back_beyond_the_memory_fires_nothing(own: Settings) -> None:  # S1
    broker = scheduler(own)
    redis_client = broker.client
    key = f"{own.namespace}:ticks:swept"
    redis_client.zadd(key, {f"{n}:x": int(at(10).timestamp()) + n * 3600 for n in range(1500)})

    wake_up(broker, at(9))

    assert ticks(broker) == []


@pytest.mark.redis_broker_only(reason="RabbitMQ keeps the message")
def test_tick_undone_by_a_failover_of_redis_is_sent_again(own: Settings) -> None:  # F2, S1
    broker = scheduler(own)
    wake_up(broker, at(9))
    client: Any = broker.client
    pattern = f"{own.namespace}:*"
    replicated = {key: client.dump(key) for key in client.scan_iter(match=pattern)}
    wake_up(broker, at(10))
    sent = [message.message_id for message in queued(broker)]

    # The replica lacks the last writes.
    client.delete(*client.scan_iter(match=pattern))
    for key, value in replicated.items():
        client.restore(key, 0, value)
    assert ticks(broker) == ["09:00"]
    wake_up(broker, at(10, 1))

    assert ticks(broker) == ["09:00", "10:00"]
    assert [message.message_id for message in queued(broker)] == sent


def test_scheduler_outlives_a_redis_outage_and_fires_the_next_tick(own: Settings) -> None:  # S3
    with embedded.start(postgres=False) as servers:
        broker = scheduler(own.model_copy(update={"redis_url": servers.redis_url}), "* * * * *")
        wake_up(broker, at(10))
        servers.stop("redis")
        wake_up(broker, at(10, 1))
        servers.start("redis")
        wake_up(broker, at(10, 2))

        assert ticks(broker) == ["10:02"]


def test_redis_outage_delays_one_actor_not_each(  # S3
    own: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with embedded.start(postgres=False) as servers:
        broker = scheduler(own.model_copy(update={"redis_url": servers.redis_url}))

        @dramatiq.actor(broker=broker, schedule="* * * * *")
        def other() -> None: ...

        servers.stop("redis")
        assert due(broker, at(10)) == []
        assert due(broker, at(10, 1)) == []

    asked = [record for record in caplog.records if "could not be checked" in record.getMessage()]
    assert len(asked) == 2


def test_unsent_tick_is_sent_the_next_minute(  # S3
    own: Settings,
) -> None:
    broker = scheduler(own)
    with redis_fault("enqueue"):
        wake_up(broker, at(10))

    wake_up(broker, at(10, 1))

    assert (ticks(broker), rows("swept")) == (["10:00"], [])


def test_tick_dropped_as_a_duplicate_is_skipped_in_the_ledger(own: Settings) -> None:  # S5, D2
    broker = scheduler(own, "* * * * *", idempotent=True)
    wake_up(broker, at(10))

    wake_up(broker, at(10, 1))

    assert ticks(broker) == ["10:00"]
    assert rows("swept") == [("skipped", "deduplicated", at(10, 1), {})]


def test_plain_actors_ticks_have_their_outcome_in_the_ledger(own: Settings) -> None:  # S5
    broker = installed(own)
    failures = iter([None, ValueError("no")])

    @dramatiq.actor(broker=broker, schedule="* * * * *", max_retries=0)
    def plain() -> None:
        if failure := next(failures):
            raise failure

    with working(broker):
        for minute in (0, 1):
            wake_up(broker, at(10, minute))
            eventually(lambda: not queued(broker))
    wake_up(broker, at(10, 1))

    assert rows("plain") == [("done", None, at(10), {}), ("failed", "no", at(10, 1), {})]


def test_tick_of_a_message_skipped_by_middleware_records_the_reason(own: Settings) -> None:  # S5
    broker = installed(own)

    @dramatiq.actor(broker=broker, schedule="* * * * *", max_age=1)
    def old() -> None: ...

    wake_up(broker, at(10))
    with working(broker):
        eventually(lambda: rows("old"))

    assert rows("old") == [("skipped", "Message age limit exceeded", at(10), {})]


def test_late_messages_and_retries_run_with_periodiqs_middleware(own: Settings) -> None:  # R3
    broker = installed(own)
    broker.add_middleware(periodiq.PeriodiqMiddleware(skip_delay=30))
    failures = iter([ValueError("not yet"), None])

    @dramatiq.actor(broker=broker, schedule="* * * * *", min_backoff=1, max_backoff=2)
    def late() -> None:
        if failure := next(failures):
            raise failure

    wake_up(broker, datetime.now(UTC) - timedelta(hours=1))
    with working(broker):
        eventually(lambda: len(rows("late")) == 2)

    assert [row[0] for row in rows("late")] == ["failed", "done"]


def test_periodiqs_schedule_option_is_understood(own: Settings) -> None:  # S2
    broker = installed(own)

    @dramatiq.actor(broker=broker, periodic=periodiq.cron("@weekly"))
    def weekly() -> None: ...

    cron = weekly.options["periodic"]
    assert isinstance(cron, Cron)
    assert cron.next(datetime(2026, 3, 5, tzinfo=UTC)) == datetime(2026, 3, 8, tzinfo=UTC)


def test_actors_that_share_a_cron_have_separate_ticks(own: Settings) -> None:  # S1
    broker = installed(own)
    shared = Cron("* * * * *")

    @dramatiq.actor(broker=broker, periodic=shared)
    def one() -> None: ...

    @dramatiq.actor(broker=broker, periodic=shared)
    def other() -> None: ...

    other.send_with_options(scheduled_at=str(at(10)))
    wake_up(broker, at(10))

    assert sorted(message.actor_name for message in queued(broker)) == ["one", "other"]


def test_schedule_for_an_actor_with_required_arguments_is_refused(own: Settings) -> None:
    broker = installed(own)

    with pytest.raises(DeclarationError, match="a schedule sends no arguments"):

        @dramatiq.actor(broker=broker, schedule="* * * * *")
        def needy(project_id: int) -> None: ...
