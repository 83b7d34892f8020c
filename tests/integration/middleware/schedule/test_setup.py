"""Schedules of built-in workers whose tables do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.middleware.applications import at, close_all, installed, queued, rows, wake_up
from tests.internals.database import Database, connect_to, database
from tests.internals.engine import register
from tests.internals.workers import configured_sweeps

STATUSES = "user_status_cleanup.batch"


@pytest.fixture
def broker(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    broker = installed(settings)
    register(broker, configured_sweeps(settings)[STATUSES])
    yield broker
    close_all()


def sent(broker: RedisBroker) -> list[str]:
    return [message.options["tick"][11:16] for message in queued(broker, "cronjob")]


def test_worker_without_its_table_gets_no_messages(broker: RedisBroker) -> None:
    for minute in (0, 1, 2):
        wake_up(broker, at(10, minute))

    assert sent(broker) == []
    assert rows(STATUSES) == []


def test_schedule_begins_when_the_table_is_created(broker: RedisBroker, postgres: Database) -> None:
    wake_up(broker, at(10, 0))
    wake_up(broker, at(10, 1))

    postgres.create_tables([UserStatus])
    wake_up(broker, at(10, 2))
    wake_up(broker, at(10, 3))

    assert sent(broker)[:1] == ["10:02"]
    assert [row for row in rows(STATUSES) if row[0] == "missed"] == []


@contextmanager
def database_away() -> Iterator[None]:
    connected = database.obj
    database.initialize(connect_to("postgresql://nobody@127.0.0.1:1/nothing"))
    yield
    database.initialize(connected)


def test_scheduler_without_a_database_sends_the_message(broker: RedisBroker) -> None:
    with database_away():
        wake_up(broker, at(10))

    assert sent(broker) == ["10:00"]


def test_worker_known_to_lack_its_table_stays_off_during_an_outage(broker: RedisBroker) -> None:
    wake_up(broker, at(10))

    with database_away():
        wake_up(broker, at(10, 1))

    assert sent(broker) == []
