"""Projects whose refs were all rejected: scheduled again after a growing delay, at once when there are new rows."""

from __future__ import annotations

from datetime import timedelta

import pytest
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import connection as Connection

from housekeeping.core.settings import Settings
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.insight.plan import dry_run
from housekeeping.sweeps.ledger.models import NOW, Rejection
from housekeeping.workers.batched_git_ref_updates.scheduling import deferred_among
from housekeeping.workers.batched_git_ref_updates.worker import cleanup_scheduler, project_cleanup
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
