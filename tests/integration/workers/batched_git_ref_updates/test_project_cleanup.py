"""Cleanup of one project (document 58, its follow-up)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import ExclusiveLease
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.database_times import DatabaseTimes
from tests.integration.workers.batched_git_ref_updates.cleaned import NONE, SMALL
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, AddRefs, Pending, Watched
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository
from tests.internals.core import WorkerSettings
from tests.internals.engine import run_sweep
from tests.internals.workers import cleanup, project_cleanup


def test_refs_are_deleted_and_rows_processed(
    repository: MakeRepository, add_refs: AddRefs, times: DatabaseTimes
) -> None:
    # 概要: the refs asked for go, the rows say so, with updated_at.
    bare = repository("refs/heads/a", "refs/tags/b", "refs/heads/kept")
    add_refs("refs/heads/a", "refs/tags/b")

    result = run_sweep(project_cleanup.configured(WorkerSettings(page_size=1)), 1, on_batch=times.note)

    assert (result.outcome, result.counts) == ("done", {**NONE, "total_deletes": 2})
    assert bare.refs() == ["refs/heads/kept"]
    rows = Deletion.select().order_by(Deletion.id)
    assert [(row.status, times.batch_of(row.updated_at)) for row in rows] == [(2, 0), (2, 1)]


def test_other_projects_and_processed_rows_are_left_alone(
    repository: MakeRepository, add_refs: AddRefs, admin: Connection
) -> None:
    first, second = repository("refs/heads/a", "refs/heads/b"), repository("refs/heads/a", project_id=2)
    add_refs("refs/heads/a", project_id=2)
    add_refs("refs/heads/a", "refs/heads/b")
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE {Deletion._meta.table_name} SET status = 2 WHERE id = 2")

    assert run_sweep(project_cleanup, 1).counts["total_deletes"] == 1
    assert (first.refs(), second.refs()) == (["refs/heads/a"], ["refs/heads/a"])


@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 9, 10, 11, 25])
def test_all_refs_are_deleted(
    watched: Watched, repository: MakeRepository, add_deletions: AddDeletions, pending: Pending, count: int
) -> None:
    # Pages, and batches of refs within them.
    bare = repository(*(f"refs/heads/{number}" for number in range(1, count + 1)))
    add_deletions(count)

    result = run_sweep(SMALL, 1)

    assert (result.outcome, result.counts["total_deletes"]) == ("done", count)
    assert (bare.refs(), pending()) == ([], [])
    assert all(len(batch) <= 5 for batch in watched.batches)


@pytest.mark.parametrize(
    ("count", "outcome", "deletes"),
    [
        (29, ("done", None), 29),
        (30, ("done", None), 30),
        (31, ("partial", "limit"), 30),
        (95, ("partial", "limit"), 30),
    ],
)
def test_a_run_ends_at_its_limit_of_rows(
    root: Path, add_deletions: AddDeletions, pending: Pending, count: int, outcome: tuple[str, str], deletes: int
) -> None:
    # Up to 10,000 rows a run; here 30. The next run continues.
    add_deletions(count)

    result = run_sweep(SMALL, 1)

    assert (result.outcome, result.reason) == outcome
    assert result.counts["total_deletes"] == deletes
    assert len(pending()) == count - deletes


@pytest.mark.slow
def test_invalid_and_refused_rows_count_towards_the_limit(
    repository: MakeRepository, add_deletions: AddDeletions
) -> None:
    # Or a project of nothing but locked refs would be walked to its end, however long.
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 41)))
    for number in range(1, 41):
        bare.lock(f"refs/heads/{number}")
    add_deletions(40)

    result = run_sweep(SMALL, 1)

    assert (result.outcome, result.reason, result.counts["failed"]) == ("partial", "limit", 30)


def test_duplicate_requests_delete_the_ref_once(
    watched: Watched, repository: MakeRepository, add_refs: AddRefs, pending: Pending
) -> None:
    # Each ref once: git refuses a batch with a duplicate.
    bare = repository("refs/heads/a", "refs/heads/b")
    add_refs("refs/heads/a", "refs/heads/b", "refs/heads/a", "refs/heads/a")

    result = run_sweep(SMALL, 1)

    assert watched.batches == [["refs/heads/a", "refs/heads/b"]]
    assert (result.counts["total_deletes"], pending(), bare.refs()) == (4, [], [])


def test_slow_batches_are_committed_in_time_for_the_heartbeat(
    watched: Watched, add_deletions: AddDeletions, monkeypatch: pytest.MonkeyPatch, pending_elsewhere: Pending
) -> None:
    # A run whose heartbeat is older than a minute counts as lost.
    monkeypatch.setattr(cleanup, "HEARTBEAT", timedelta())
    left: list[int] = []
    watched.before = lambda number, refs: left.append(len(pending_elsewhere()))
    add_deletions(20)

    assert run_sweep(SMALL, 1).counts["total_deletes"] == 20
    assert left == [20, 15, 10, 5]


def test_lease_is_per_project(root: Path, add_deletions: AddDeletions, pending: Pending) -> None:
    # 排他制御: 10 minutes, never waits; other projects are cleaned meanwhile.
    add_deletions(2, project="n")
    lease = project_cleanup.lease
    assert lease is not None

    with ExclusiveLease("batched_git_ref_updates/project_cleanup/1", timedelta(minutes=10)):
        first, second = run_sweep(project_cleanup, 1), run_sweep(project_cleanup, 2)

    assert (first.outcome, first.reason, first.exit_code) == ("skipped", "lease_held", 0)
    assert second.outcome == "done"
    assert pending() == ["refs/heads/1"]
    assert (lease.key_for(7), lease.ttl) == ("batched_git_ref_updates/project_cleanup/7", timedelta(minutes=10))
