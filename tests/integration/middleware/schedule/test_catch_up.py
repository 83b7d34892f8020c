"""Catch-up of ticks that no scheduler fired."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from housekeeping import Settings
from tests.faults import at_step, lose_database
from tests.integration.middleware.applications import (
    at,
    close_all,
    rows,
    scheduler,
    ticks,
    wake_up,
)
from tests.internals.database import Database
from tests.internals.ledger import runs


@pytest.fixture
def own(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Iterator[Settings]:
    yield settings
    close_all()


def test_latest_missed_tick_fires_and_the_others_are_recorded(own: Settings) -> None:  # S4, S5
    wake_up(scheduler(own), at(10))

    late = scheduler(own)
    wake_up(late, at(14, 20))
    wake_up(late, at(14, 21))

    assert ticks(late) == ["10:00", "14:00"]
    assert rows("swept") == [("missed", "no_scheduler", at(13), {"missed": 3})]


def test_tick_at_the_minute_of_start_is_the_latest(own: Settings) -> None:  # S4
    wake_up(scheduler(own, "* * * * *"), at(10))

    late = scheduler(own, "* * * * *")
    wake_up(late, at(10, 5))

    assert ticks(late) == ["10:00", "10:05"]
    assert rows("swept") == [("missed", "no_scheduler", at(10, 4), {"missed": 4})]


def test_missed_ticks_are_recorded_once_without_catch_up(own: Settings) -> None:  # S4, S5
    off = own.model_copy(update={"catch_up": "none"})
    wake_up(scheduler(off), at(10))

    late = scheduler(off)
    wake_up(late, at(14, 20))
    wake_up(late, at(14, 21))
    wake_up(scheduler(off), at(15))

    assert ticks(late) == ["10:00", "15:00"]
    assert rows("swept") == [("missed", "no_scheduler", at(14), {"missed": 4})]


def test_fresh_installation_has_missed_no_ticks(own: Settings) -> None:  # S4
    broker = scheduler(own)

    wake_up(broker, at(10, 30))

    assert (ticks(broker), rows("swept")) == ([], [])


def test_tick_missed_soon_after_the_first_start_is_caught_up(own: Settings) -> None:  # S4
    wake_up(scheduler(own), at(10, 30))

    late = scheduler(own)
    wake_up(late, at(11, 5))

    assert (ticks(late), rows("swept")) == (["11:00"], [])


def test_ledger_remembers_ticks_when_redis_lost_its_data(own: Settings) -> None:  # S4, S5
    runs.record("swept", "skipped", "paused", message_id=None, tick=at(10), trigger="schedule")

    broker = scheduler(own)
    wake_up(broker, at(14, 20))

    assert ticks(broker) == ["14:00"]
    assert rows("swept")[1:] == [("missed", "no_scheduler", at(13), {"missed": 3})]


def test_tick_in_the_ledger_is_not_repeated_when_redis_lost_its_data(own: Settings) -> None:  # S1, S4
    runs.record("swept", "skipped", "paused", message_id=None, tick=at(14), trigger="schedule")

    broker = scheduler(own)
    wake_up(broker, at(14, 20))

    assert ticks(broker) == []
    assert len(rows("swept")) == 1


def test_missed_ticks_are_recorded_when_the_database_returns(own: Settings) -> None:
    wake_up(scheduler(own), at(10))
    late = scheduler(own)
    with at_step(runs, "record", "before", lose_database):  # S5
        wake_up(late, at(14))

    wake_up(late, at(14, 1))

    assert rows("swept") == [("missed", "no_scheduler", at(13), {"missed": 3})]
