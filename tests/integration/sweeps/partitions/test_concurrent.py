"""Several runs on one table: each partition is dropped once, by a worker that wants it dropped."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from housekeeping import Lease
from tests.faults import Crash, at_number, at_step, crash, elsewhere
from tests.integration.conftest import LoseLease
from tests.integration.sweeps.partitions.events import (
    AGE,
    KEPT,
    close_killed_runs,
    concurrently,
    partitions,
    recorded,
    run,
    sweep,
    tables,
)
from tests.internals.database import database
from tests.internals.engine import RunResult
from tests.internals.ledger import Run, begin
from tests.internals.sweeps import PartitionStage, partition_catalog

LEASED: Any = dataclasses.replace(sweep(lock_retries=0), lease=Lease("events", timedelta(minutes=10)))


class Another:
    """Run in another thread, and its result."""

    def __init__(self, of: Any) -> None:
        self._of = of
        self.result: RunResult | None = None

    def run(self) -> None:
        try:
            self.result = run(self._of)
        finally:
            database.close()

    def count(self, name: str) -> int:
        assert self.result is not None
        number: int = self.result.counts[name]
        return number


def _sum(count: str) -> int:
    return sum(row.counts.get(count, 0) for row in Run.select())


def test_parallel_runs_drop_each_partition_once(either_way: None) -> None:
    together = threading.Barrier(3, timeout=20)

    def begin(number: int) -> tuple[str, BaseException | None]:
        together.wait()
        try:
            result = run(sweep())
            return result.outcome, result.error
        finally:
            database.close()

    with ThreadPoolExecutor(3) as threads:
        outcomes = list(threads.map(begin, range(3)))

    assert outcomes == [("done", None)] * 3
    assert [name for name in tables() if name != "events_other"] == KEPT
    assert _sum("dropped_partitions") == 2


@concurrently
def test_run_drops_what_another_run_of_its_worker_has_detached(months: None) -> None:
    another = Another(sweep(lock_retries=0))

    with at_step(PartitionStage, "prepare", "after", at_number(1, elsewhere(another.run))):
        result = run(sweep())

    assert (another.count("dropped_partitions"), result.counts["dropped_partitions"]) == (2, 0)
    assert tables() == KEPT and result.outcome == "done"


@concurrently
def test_table_that_another_worker_detached_is_left_to_it(months: None) -> None:
    with pytest.raises(Crash), at_step(partition_catalog, "detach_concurrently", "after", crash):
        run(sweep(keep_table=True))
    close_killed_runs()

    other = run(dataclasses.replace(sweep(), name="shop.other_events"))
    between = tables()
    own = run(sweep(keep_table=True))

    assert (other.counts["dropped_partitions"], between) == (1, ["events_09", *KEPT])
    assert own.counts["detached_partitions"] == 1
    assert tables() == ["events_09", *KEPT] and recorded() == []


@concurrently
def test_record_goes_to_the_worker_that_detaches_the_partition(months: None) -> None:
    """Another worker was killed before it detached the same partition, and was removed."""
    other = dataclasses.replace(sweep(), name="shop.other_events")
    with pytest.raises(Crash), at_step(partition_catalog, "detach_concurrently", "before", crash):
        run(other)
    with pytest.raises(Crash), at_step(partition_catalog, "detach_concurrently", "after", crash):
        run(sweep())
    close_killed_runs()

    result = run(sweep())

    assert (result.counts["dropped_partitions"], tables(), recorded()) == (2, KEPT, [])


@concurrently
def test_run_that_lost_its_lease_after_detaching_drops_nothing(months: None, lose_lease: LoseLease) -> None:
    successor = Another(LEASED)

    def take_over() -> None:
        lose_lease("events")
        elsewhere(successor.run)()

    with at_step(PartitionStage, "prepare", "after", at_number(1, take_over)):
        zombie = run(LEASED)

    assert (zombie.outcome, zombie.counts["dropped_partitions"]) == ("lost_lease", 0)
    assert successor.count("dropped_partitions") == 2 and tables() == KEPT


@concurrently
def test_database_refuses_the_drop_once_another_run_has_begun(months: None, lose_lease: LoseLease) -> None:
    """The other run has the lease, and has not looked at any partition yet."""

    def take_over() -> None:
        lose_lease("events")
        elsewhere(lambda: begin(LEASED.name, message_id=None, tick=None, trigger="cli", lease=("events", "another")))()

    with at_step(PartitionStage, "prepare", "after", at_number(1, take_over)):
        zombie = run(LEASED)

    assert (zombie.outcome, zombie.counts["dropped_partitions"]) == ("lost_lease", 0)
    assert tables() == ["events_09", "events_10", *KEPT] and "events_09" not in partitions()


@concurrently
def test_run_that_was_taken_over_detaches_nothing(months: None, lose_lease: LoseLease) -> None:
    """The successor wants to keep the partitions, and closes the sleeping run's row."""
    older = dataclasses.replace(LEASED, stages=dataclasses.replace(LEASED.stages, older_than=20 * AGE))
    successor = Another(older)

    def take_over() -> None:
        lose_lease("events")
        close_killed_runs()
        elsewhere(successor.run)()

    with at_step(PartitionStage, "reason_to_stay", "after", at_number(1, take_over)):
        zombie = run(LEASED)

    assert zombie.outcome == "lost_lease" and successor.count("dropped_partitions") == 0
    assert len(partitions()) == 4 and recorded() == []


@pytest.mark.slow
@concurrently
def test_record_stays_while_another_run_detaches(months: None, lose_lease: LoseLease) -> None:
    """The successor of a sleeping run cannot drop the partition, and does not remove the record."""
    successor = Another(LEASED)

    def take_over() -> None:
        lose_lease("events")
        elsewhere(successor.run)()

    with at_step(partition_catalog, "detach_concurrently", "before", at_number(1, take_over)):
        zombie = run(LEASED)
    detached = "events_09" not in partitions(), recorded()
    last = run(LEASED)

    assert (zombie.outcome, successor.count("skipped_partitions")) == ("lost_lease", 2)
    assert detached[0] and detached[1] == ["events_09"]
    assert last.counts["dropped_partitions"] == 2 and tables() == KEPT


_OCTOBER = "FOR VALUES FROM ('2025-10-01') TO ('2025-11-01')"
_JANUARY = "FOR VALUES FROM ('2026-01-01') TO ('2026-02-01')"
_PARENT = "SELECT inhparent::regclass::text FROM pg_inherits WHERE inhrelid = to_regclass('events_10')"


@pytest.mark.parametrize(
    "statements",
    [
        ["DROP TABLE events_10", f"CREATE TABLE events_10 PARTITION OF events {_JANUARY}"],
        [
            "ALTER TABLE events DETACH PARTITION events_10",
            "TRUNCATE events_10",
            f"ALTER TABLE events ATTACH PARTITION events_10 {_JANUARY}",
        ],
        [
            "ALTER TABLE events DETACH PARTITION events_10",
            "CREATE TABLE events_of_others (LIKE events) PARTITION BY RANGE (happened_at)",
            f"ALTER TABLE events_of_others ATTACH PARTITION events_10 {_OCTOBER}",
        ],
    ],
    ids=["created again", "with other bounds", "of another table"],
)
def test_partition_that_another_session_replaces_is_left_alone(either_way: None, statements: list[str]) -> None:
    """The run has read the catalog, and is at the partition before."""

    def replace_it() -> None:
        for statement in statements:
            database.execute_sql(statement)

    with at_step(PartitionStage, "prepare", "after", at_number(1, replace_it)):
        result = run(sweep())

    assert (result.outcome, result.counts["dropped_partitions"]) == ("done", 1), result.error
    assert database.execute_sql(_PARENT).fetchone() is not None
    assert recorded() == [] and "events_09" not in tables()


def test_table_that_another_session_detached_meanwhile_is_never_dropped(either_way: None) -> None:
    """Neither by the run that has read the catalog before, nor by the next one."""
    detach = at_number(1, lambda: database.execute_sql("ALTER TABLE events DETACH PARTITION events_10"))
    with at_step(PartitionStage, "prepare", "after", detach):
        first = run(sweep())

    second = run(sweep())

    assert [each.counts["dropped_partitions"] for each in (first, second)] == [1, 0]
    assert "events_10" in tables() and recorded() == []
