"""Projects whose refs were all rejected: scheduled again after a growing delay, at once when there are new rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import PurePath

import pytest
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import connection as Connection

from housekeeping.core.settings import Settings
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.insight.plan import dry_run
from housekeeping.sweeps.ledger.models import NOW, Rejection
from housekeeping.workers.batched_git_ref_updates.backends import backends
from housekeeping.workers.batched_git_ref_updates.ref_deletion import RefsRefused
from housekeeping.workers.batched_git_ref_updates.scheduling import deferred_among
from housekeeping.workers.batched_git_ref_updates.worker import cleanup_scheduler, project_cleanup
from tests.integration.workers.batched_git_ref_updates.cleaned import NONE, SMALL
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, AddRefs, Explained, Pending
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository
from tests.integration.workers.batched_git_ref_updates.scheduled import drain, enqueued, sized
from tests.integration.workers.batched_git_ref_updates.test_statement_costs import INDEX

#: The counts of a run that enqueued one project.
ONE = {"total_projects": 1, "enqueued": 1, "deduplicated": 0}


def locked(repository: MakeRepository, project_id: int = 1, ref: str = "refs/heads/a") -> None:
    """Project whose only ref stays locked."""
    repository(ref, project_id=project_id).lock(ref)


def let_time_pass() -> None:
    Rejection.update(not_before=NOW - timedelta(seconds=1)).where(Rejection.not_before.is_null(False)).execute()


def test_rejected_project_is_left_out_until_its_delay_has_passed(
    broker: RedisBroker, settings: Settings, repository: MakeRepository, add_refs: AddRefs
) -> None:
    locked(repository)
    add_refs("refs/heads/a")
    add_refs("refs/heads/b", project_id=2)
    run_sweep(project_cleanup, 1)

    first = run_sweep(cleanup_scheduler)
    left_out = drain(broker, settings)
    let_time_pass()
    run_sweep(cleanup_scheduler)

    assert first.counts == ONE, "of those left out none is counted"
    assert (left_out, enqueued(broker)) == ([2], [1, 2])


def test_delay_doubles_with_each_run_that_rejects_everything(repository: MakeRepository, add_refs: AddRefs) -> None:
    locked(repository)
    add_refs("refs/heads/a")
    delays = []

    for _ in range(8):
        run_sweep(project_cleanup, 1)
        row = Rejection.get()
        delays.append(round((row.not_before - row.last_at).total_seconds() / 60))

    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]


def test_rejected_project_with_a_new_row_is_scheduled_at_once(
    broker: RedisBroker, repository: MakeRepository, add_refs: AddRefs
) -> None:
    locked(repository)
    add_refs("refs/heads/a")
    run_sweep(project_cleanup, 1)
    add_refs("refs/heads/new")

    assert run_sweep(cleanup_scheduler).counts == ONE
    assert enqueued(broker) == [1]


def test_new_row_of_another_project_schedules_no_rejected_one(
    broker: RedisBroker, repository: MakeRepository, add_refs: AddRefs
) -> None:
    locked(repository, project_id=2)
    add_refs("refs/heads/a", project_id=2)
    run_sweep(project_cleanup, 2)
    add_refs("refs/heads/new", project_id=1)

    run_sweep(cleanup_scheduler)

    assert enqueued(broker) == [1]


def test_project_with_a_processed_row_is_not_deferred(
    broker: RedisBroker, repository: MakeRepository, add_refs: AddRefs
) -> None:
    locked(repository)
    add_refs("refs/heads/a", "refs/heads/b")

    run_sweep(project_cleanup, 1)
    run_sweep(cleanup_scheduler)

    assert (Rejection.get().times, Rejection.get().not_before) == (0, None)
    assert enqueued(broker) == [1]


def test_deferred_project_runs_when_it_is_run_by_hand(
    repository: MakeRepository, add_refs: AddRefs, pending: Pending
) -> None:
    bare = repository("refs/heads/a")
    lock = bare.lock("refs/heads/a")
    add_refs("refs/heads/a")
    run_sweep(project_cleanup, 1)
    lock.unlink()

    assert run_sweep(project_cleanup, 1).counts["total_deletes"] == 1
    assert (pending(), list(Rejection.select())) == ([], [])


def test_deferred_projects_do_not_use_up_a_run_s_limit(
    broker: RedisBroker, repository: MakeRepository, add_refs: AddRefs
) -> None:
    for project_id in range(1, 6):
        locked(repository, project_id)
        add_refs("refs/heads/a", project_id=project_id)
        run_sweep(project_cleanup, project_id)
    add_refs("refs/heads/a", project_id=6)

    result = run_sweep(sized(max_projects=2, batch_size=2))

    assert (result.outcome, result.counts) == ("done", ONE)
    assert enqueued(broker) == [6]


def test_plan_leaves_deferred_projects_out(broker: RedisBroker, repository: MakeRepository, add_refs: AddRefs) -> None:
    locked(repository)
    add_refs("refs/heads/a")
    run_sweep(project_cleanup, 1)
    add_refs("refs/heads/b", project_id=2)

    planned = dry_run(cleanup_scheduler)

    assert planned.counts["total_projects"] == 1
    assert run_sweep(cleanup_scheduler).counts["total_projects"] == 1


def test_no_query_for_delays_without_deferred_projects(
    broker: RedisBroker, add_deletions: AddDeletions, statements: list[str]
) -> None:
    add_deletions(300, project="n")

    run_sweep(cleanup_scheduler)

    assert len([sql for sql in statements if '"rejections"' in sql and "not_before" in sql]) == 1, "once a run"


def test_deferred_projects_cost_one_statement_per_thousand(
    broker: RedisBroker,
    repository: MakeRepository,
    add_refs: AddRefs,
    add_deletions: AddDeletions,
    statements: list[str],
) -> None:
    locked(repository)
    add_refs("refs/heads/a")
    run_sweep(project_cleanup, 1)
    add_deletions(1999, project="n + 1")
    statements.clear()

    assert run_sweep(cleanup_scheduler).counts["total_projects"] == 1999
    assert len([sql for sql in statements if '"rejections"' in sql and "not_before" in sql]) == 2


def test_new_rows_of_deferred_projects_are_found_by_index(
    add_deletions: AddDeletions, admin: Connection, settings: Settings, explained: Explained
) -> None:
    add_deletions(20_000, project="n % 100")
    with admin.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {settings.schema_name}.rejections "
            "(worker, subject, cause, rows, times, not_before, position) "
            "SELECT 'batched_git_ref_updates.project_cleanup', n, 'x', 1, 1, now() + interval '1 h', '[1000000, 1]' "
            "FROM generate_series(1, 2000) AS n; ANALYZE"
        )

    (text,) = explained(lambda: deferred_among(list(range(100))))

    assert INDEX in text and "Seq Scan on batched" not in text
    assert len(deferred_among(list(range(100)))) == 99


class Refusing:
    """Deletion that refuses these refs and records the others."""

    def __init__(self, *refused: str) -> None:
        self.refused = set(refused)
        self.deleted: list[str] = []

    def delete(self, repository: PurePath, refs: Sequence[str]) -> None:
        if self.refused & set(refs):
            raise RefsRefused("locked")
        self.deleted += refs


def names(first: int, last: int) -> list[str]:
    return [f"refs/heads/{number}" for number in range(first, last + 1)]


def refusing(*refused: str) -> Refusing:
    deletion = Refusing(*refused)
    backends.replace(deletion=deletion)
    return deletion


@pytest.mark.usefixtures("root")
def test_refused_rows_do_not_starve_rows_behind_them(add_deletions: AddDeletions, pending: Pending) -> None:
    # A run handles 30 rows.
    deletion = refusing(*names(1, 70))
    add_deletions(80)

    results = [run_sweep(SMALL, 1) for _ in range(3)]

    assert [(result.reason, result.counts["failed"]) for result in results] == [
        ("limit", 30),
        ("limit", 30),
        ("limit", 20),
    ]
    assert deletion.deleted == names(71, 80)
    assert pending() == names(1, 70)


@pytest.mark.usefixtures("root")
def test_run_that_began_behind_refused_rows_wraps_around(add_deletions: AddDeletions, pending: Pending) -> None:
    deletion = refusing(*names(1, 40))
    add_deletions(45)
    run_sweep(SMALL, 1)
    deletion.refused.clear()

    second, third = run_sweep(SMALL, 1), run_sweep(SMALL, 1)

    assert deletion.deleted == [*names(31, 45), *names(1, 30)]
    assert ((second.outcome, second.reason), (third.outcome, third.reason)) == (("partial", "limit"), ("done", None))
    assert (pending(), list(Rejection.select())) == ([], [])


@pytest.mark.usefixtures("root")
def test_run_that_wrapped_ends_where_it_began(add_deletions: AddDeletions, pending: Pending) -> None:
    deletion = refusing(*names(1, 30))
    add_deletions(31)
    run_sweep(SMALL, 1)
    deletion.refused = set(names(1, 29))

    second, third = run_sweep(SMALL, 1), run_sweep(SMALL, 1)

    assert (second.outcome, third.outcome) == ("partial", "done")
    assert second.counts == third.counts == {**NONE, "total_deletes": 1, "failed": 29}
    assert pending() == names(1, 29)


@pytest.mark.usefixtures("root")
def test_project_with_more_refused_rows_than_a_run_handles_is_deferred(
    broker: RedisBroker, settings: Settings, add_deletions: AddDeletions, add_refs: AddRefs
) -> None:
    refusing(*names(1, 40), "refs/heads/new")
    add_deletions(40)
    run_sweep(SMALL, 1)
    run_sweep(cleanup_scheduler)
    half_way = drain(broker, settings)
    run_sweep(SMALL, 1)
    run_sweep(cleanup_scheduler)
    after_all = enqueued(broker)
    add_refs("refs/heads/new")
    run_sweep(cleanup_scheduler)

    assert (half_way, after_all, enqueued(broker)) == ([1], [], [1])


@pytest.mark.usefixtures("root")
def test_project_without_rejections_is_no_longer_deferred(
    repository: MakeRepository, add_refs: AddRefs, deletions: object
) -> None:
    locked(repository)
    add_refs("refs/heads/a")
    run_sweep(project_cleanup, 1)
    repository(project_id=2)
    run_sweep(project_cleanup, 2)

    assert [row.subject for row in Rejection.select()] == ["1"], "another project's run says nothing of it"
