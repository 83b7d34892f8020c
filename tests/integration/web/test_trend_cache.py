"""Cache of the trends: when they are read, and what is not kept."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping.testing.stubs import ManualClock
from tests.internals.database import Database
from tests.internals.insight import Range
from tests.internals.ledger import Run
from tests.internals.web import TrendCache
from tests.internals.workers import status_sweep as sweep

AT = datetime(2026, 1, 7, 12, 10, 0, tzinfo=UTC)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(AT)


@pytest.fixture
def cache(postgres: Database, clock: ManualClock) -> TrendCache:
    return TrendCache({sweep.name: sweep}, clock)


def record_run() -> None:
    Run.create(worker=sweep.name, trigger="schedule", outcome="done", started_at=AT, heartbeat_at=AT, finished_at=AT)


def runs(cache: TrendCache, length: Range = "week", worker: str | None = None) -> int:
    return sum(each.runs for each in cache.read(length, worker).intervals)


@pytest.mark.parametrize(("length", "seconds"), [("hour", 1), ("day", 30), ("week", 180)])
def test_trends_are_read_sixty_times_in_an_interval(
    cache: TrendCache, clock: ManualClock, length: Range, seconds: float
) -> None:
    first = cache.read(length, None)
    record_run()

    clock.advance(timedelta(seconds=seconds - 0.001))
    assert cache.read(length, None) is first
    clock.advance(timedelta(seconds=0.001))
    assert (cache.read(length, None).at, runs(cache, length)) == (clock.now(), 1)


def test_each_worker_and_range_has_its_own_trends(cache: TrendCache) -> None:
    record_run()

    assert [runs(cache, "week", worker) for worker in (None, sweep.name, "other")] == [1, 1, 0]
    assert len(cache.read("hour", None).intervals) == 60


@pytest.mark.one_database_only(reason="the test names runs of the only database")
def test_trends_without_a_database_are_not_kept(cache: TrendCache, admin: Connection) -> None:
    record_run()
    with admin.cursor() as cursor:
        cursor.execute(f'BEGIN; LOCK TABLE "{Run._meta.schema}".runs')
        missing = cache.read("week", None)
        cursor.execute("ROLLBACK")

    assert len(missing.unavailable) == 1 and runs(cache) == 1


def test_number_of_kept_trends_is_limited(cache: TrendCache) -> None:
    first = cache.read("week", None)

    for number in range(100):
        cache.read("hour", f"worker_{number}")

    assert cache.read("week", None) is not first
