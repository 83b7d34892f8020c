"""Runs that are killed between detach and drop: the next run finishes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from datetime import timedelta

import psycopg2
import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Sweep
from housekeeping.testing.points import Ended, run_in_process
from housekeeping.testing.stubs import ManualClock
from tests.faults import Crash, at_step, crash
from tests.integration.conftest import Locked
from tests.integration.sweeps.partitions.events import (
    KEPT,
    NOW,
    close_killed_runs,
    concurrently,
    create,
    exported,
    partitions,
    recorded,
    run,
    sweep,
    tables,
)
from tests.internals.database import Database, database
from tests.internals.insight import plan
from tests.internals.ledger import Run
from tests.internals.sweeps import partition_catalog


def _sum(count: str) -> int:
    return sum(row.counts.get(count, 0) for row in Run.select())


def _killed_at_each_point(of: Sweep, *, has_default: bool) -> Iterator[Ended]:
    """Kill a run before each of its points, run the sweep again, and yield how the killed one ended."""
    alive = random.getrandbits(62)
    for number in itertools.count():
        create(has_default=has_default)
        Run.delete().execute()
        ended = run_in_process(lambda: run(of).outcome, number, alive)
        # The server has noticed that the process is gone.
        database.execute_sql("SELECT pg_advisory_lock(%s), pg_advisory_unlock(%s)", (alive, alive))
        close_killed_runs()
        assert run(of).outcome == "done"
        yield ended
        if not ended.killed:
            return


@pytest.mark.slow
@concurrently
@pytest.mark.parametrize("has_default", [False, True], ids=["concurrently", "with DEFAULT partition"])
@pytest.mark.parametrize("keep_table", [False, True], ids=["dropped", "kept"])
def test_run_killed_at_any_point_is_finished_by_the_next(
    postgres: Database, has_default: bool, keep_table: bool
) -> None:
    count = "detached_partitions" if keep_table else "dropped_partitions"
    points: list[str] = []

    for ended in _killed_at_each_point(sweep(stale=exported, keep_table=keep_table), has_default=has_default):
        where = f"killed before {ended.points[-1]}"
        assert [name for name in partitions() if name != "events_other"] == KEPT, where
        left = [name for name in tables() if name != "events_other"]
        assert left == (["events_09", "events_10", *KEPT] if keep_table else KEPT), where
        assert recorded() == [], where
        assert _sum(count) == 2, where
        points = ended.points

    assert any("CONCURRENTLY" in point for point in points) is not has_default


@concurrently
def test_run_killed_between_detach_and_drop_is_finished_by_the_next(killed: None) -> None:
    between = partitions(), tables(), recorded()

    close_killed_runs()
    result = run(sweep())

    assert between[0] == ["events_10", *KEPT] and between[1] == ["events_09", "events_10", *KEPT]
    assert between[2] == ["events_09"]
    assert (tables(), result.counts["dropped_partitions"]) == (KEPT, 2)


@concurrently
def test_interrupted_detachment_is_finalized(months: None, admin: Connection, locked: Locked) -> None:
    with locked("SELECT FROM events"), admin.cursor() as cursor:
        cursor.execute("SET lock_timeout = 300")
        with pytest.raises(psycopg2.errors.LockNotAvailable):
            cursor.execute("ALTER TABLE events DETACH PARTITION events_10 CONCURRENTLY")
    (pending,) = database.execute_sql("SELECT count(*) FROM pg_inherits WHERE inhdetachpending").fetchone()

    result = run(sweep())

    assert pending == 1
    assert (tables(), result.counts["dropped_partitions"], result.outcome) == (KEPT, 2, "done")


@concurrently
def test_detachment_of_another_partition_is_left_to_its_owner(months: None, admin: Connection, locked: Locked) -> None:
    with locked("SELECT FROM events"), admin.cursor() as cursor:
        cursor.execute("SET lock_timeout = 300")
        with pytest.raises(psycopg2.errors.LockNotAvailable):
            cursor.execute("ALTER TABLE events DETACH PARTITION events_12 CONCURRENTLY")

    result = run(sweep())

    assert (result.outcome, result.counts["skipped_partitions"], len(tables())) == ("done", 2, 4)


@concurrently
def test_detached_table_that_is_renamed_is_kept(killed: None) -> None:
    database.execute_sql("ALTER TABLE events_09 RENAME TO events_to_keep")

    result = run(sweep())

    assert result.counts["dropped_partitions"] == 1 and "events_to_keep" in tables()
    assert recorded() == []


@concurrently
def test_detached_table_that_is_too_young_now_is_attached_again(killed: None) -> None:
    old = sweep(older_than=timedelta(days=4000))

    planned = plan(old, clock=ManualClock(NOW)).as_json()["stages"][0]["samples"]
    result = run(old)

    assert [row["stays"] for row in planned] == ["its range is no longer over"]
    assert (result.outcome, result.counts["skipped_partitions"]) == ("done", 1)
    assert len(partitions()) == 4 and recorded() == []


@concurrently
def test_detached_table_whose_range_is_taken_stays_detached(killed: None) -> None:
    database.execute_sql("CREATE TABLE events_new PARTITION OF events FOR VALUES FROM ('2025-09-01') TO ('2025-10-01')")

    result = run(sweep(older_than=timedelta(days=4000)))

    assert (result.outcome, result.counts["skipped_partitions"]) == ("done", 1), result.error
    assert "events_09" in tables() and "events_09" not in partitions()


@concurrently
def test_record_of_a_partition_that_stays_is_removed(months: None) -> None:
    with pytest.raises(Crash), at_step(partition_catalog, "detach_concurrently", "before", crash):
        run(sweep())
    before = recorded()
    database.execute_sql("UPDATE events SET exported = false WHERE happened_at < '2025-10-01'")

    run(sweep(stale=exported))

    assert (before, recorded()) == (["events_09"], []) and "events_09" in partitions()
