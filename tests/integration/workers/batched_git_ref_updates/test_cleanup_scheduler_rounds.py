"""Projects enqueued by a run of the scheduler, and where the next run resumes (document 58)."""

from __future__ import annotations

import pytest
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions
from tests.integration.workers.batched_git_ref_updates.scheduled import drain, enqueued, sized
from tests.internals.engine import run_sweep
from tests.internals.workers import GIT_BATCH_SIZE as BATCH_SIZE
from tests.internals.workers import GIT_MAX_RUNTIME as MAX_RUNTIME
from tests.internals.workers import cleanup_scheduler


@pytest.mark.parametrize("count", [1, BATCH_SIZE - 1, BATCH_SIZE, BATCH_SIZE + 1, 10 * BATCH_SIZE, 11 * BATCH_SIZE])
def test_all_projects_are_enqueued(broker: RedisBroker, add_deletions: AddDeletions, count: int) -> None:
    # パフォーマンス要件: in batches of 100; ten of them are counted together.
    add_deletions(count, project="n")
    seen: list[int] = []

    result = run_sweep(cleanup_scheduler, on_batch=lambda counts: seen.append(counts["total_projects"]))

    assert (result.outcome, result.counts["enqueued"]) == ("done", count)
    assert seen == [*range(10 * BATCH_SIZE, count, 10 * BATCH_SIZE), count]
    assert enqueued(broker) == list(range(1, count + 1))


@pytest.mark.parametrize(("count", "outcome"), [(9, "done"), (10, "done"), (11, "partial"), (40, "partial")])
@pytest.mark.parametrize("batch_size", [3, 5, 10, 100])
def test_a_run_ends_at_its_limit_of_projects(
    broker: RedisBroker, add_deletions: AddDeletions, count: int, outcome: str, batch_size: int
) -> None:
    # 処理フロー 6: MAX_PROJECTS; here 10.
    add_deletions(count, project="n")

    result = run_sweep(sized(10, batch_size))

    assert (result.outcome, result.reason) == (outcome, "limit" if outcome == "partial" else None)
    assert result.counts["total_projects"] == min(count, 10)
    assert enqueued(broker) == list(range(1, min(count, 10) + 1))


def test_next_run_resumes_and_ends_where_it_began(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings
) -> None:
    # document 58: high ids do not starve.
    add_deletions(25, project="n")
    rounds = []
    for _ in range(4):
        result = run_sweep(sized(10, 4))
        rounds.append((result.outcome, result.counts["total_projects"], drain(broker, settings)))

    assert rounds == [
        ("partial", 10, list(range(1, 11))),
        ("partial", 10, list(range(11, 21))),
        ("partial", 10, [*range(1, 6), *range(21, 26)]),
        ("partial", 10, list(range(6, 16))),
    ]


@pytest.mark.parametrize("batch_size", [1, 4, 10, 25, 100])
def test_wrapping_run_enqueues_each_project_once(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings, batch_size: int
) -> None:
    add_deletions(25, project="n")
    run_sweep(sized(10, batch_size))
    drain(broker, settings)

    result = run_sweep(sized(1000, batch_size))

    assert (result.outcome, result.counts) == ("done", {"total_projects": 25, "enqueued": 25, "deduplicated": 0})
    assert enqueued(broker) == list(range(1, 26))


def test_run_after_a_full_round_begins_at_the_front(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings
) -> None:
    add_deletions(15, project="n")
    for expected in (list(range(1, 11)), [*range(1, 6), *range(11, 16)]):
        run_sweep(sized(10))
        assert drain(broker, settings) == expected
    run_sweep(sized(100))
    drain(broker, settings)

    run_sweep(sized(10))

    assert enqueued(broker) == list(range(1, 11))


def test_limit_exactly_at_the_start_is_a_full_round(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings
) -> None:
    add_deletions(20, project="n")
    run_sweep(sized(10))
    drain(broker, settings)

    result = run_sweep(sized(20, 7))

    assert (result.outcome, result.counts["total_projects"]) == ("done", 20)


def test_project_of_the_cursor_may_be_gone(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings, admin: Connection
) -> None:
    add_deletions(25, project="n")
    run_sweep(sized(10))
    drain(broker, settings)
    with admin.cursor() as cursor:
        cursor.execute(f"DELETE FROM {Deletion._meta.table_name} WHERE project_id BETWEEN 5 AND 12")

    result = run_sweep(sized(100))

    assert (result.outcome, enqueued(broker)) == ("done", [*range(1, 5), *range(13, 26)])


def test_failing_low_ids_do_not_starve_high_ids(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings
) -> None:
    add_deletions(100, project="n")
    seen: set[int] = set()
    for _ in range(10):
        run_sweep(sized(10, 3))
        seen |= set(drain(broker, settings))

    assert seen == set(range(1, 101))


def test_run_stops_at_its_time_limit(broker: RedisBroker, add_deletions: AddDeletions, settings: Settings) -> None:
    # パフォーマンス要件: 目標処理時間 10分以内; the next run continues.
    add_deletions(3 * BATCH_SIZE, project="n")

    result = run_sweep(cleanup_scheduler, clock=ManualClock(tick=2 * MAX_RUNTIME))

    assert (result.outcome, result.reason) == ("partial", "out_of_time")
    assert drain(broker, settings) == list(range(1, BATCH_SIZE + 1))
    run_sweep(sized(BATCH_SIZE))
    assert enqueued(broker) == list(range(BATCH_SIZE + 1, 2 * BATCH_SIZE + 1))
