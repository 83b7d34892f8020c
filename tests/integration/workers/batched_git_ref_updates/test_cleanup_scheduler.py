"""The scheduler of document 58: projects that a run enqueues, where the next run resumes, and outages."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis
from peewee import fn
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.faults import redis_fault
from tests.integration.middleware.applications import eventually, queued, working
from tests.integration.middleware.step_worker import StepWorker
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, Pending
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository
from tests.integration.workers.batched_git_ref_updates.scheduled import NONE, drain, enqueued, sized
from tests.internals.database import Database
from tests.internals.engine import actor_named, run_sweep
from tests.internals.ledger import Run
from tests.internals.workers import GIT_BATCH_SIZE as BATCH_SIZE
from tests.internals.workers import GIT_MAX_RUNTIME as MAX_RUNTIME
from tests.internals.workers import backends, cleanup_scheduler, project_cleanup


def test_each_project_with_pending_rows_is_enqueued_once(
    broker: RedisBroker, add_deletions: AddDeletions, admin: Connection
) -> None:
    # 処理フロー 3, 4, 5; データベース操作仕様: status = pending, each project_id once.
    add_deletions(30, project="1 + n % 3")
    add_deletions(5, project="7")
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE {Deletion._meta.table_name} SET status = 2 WHERE project_id = 7")

    result = run_sweep(cleanup_scheduler)

    assert (result.outcome, result.reason) == ("done", None)
    assert result.counts == {"total_projects": 3, "enqueued": 3, "deduplicated": 0}
    assert enqueued(broker) == [1, 2, 3]


def test_run_without_pending_rows_is_done(broker: RedisBroker) -> None:
    # 実行可否判定
    result = run_sweep(cleanup_scheduler)

    assert (result.outcome, result.counts) == ("done", NONE)
    assert enqueued(broker) == []


def test_messages_are_for_the_project_cleanup(broker: RedisBroker, add_deletions: AddDeletions) -> None:
    # 出力仕様: ProjectCleanupWorkerキュー; 備考: without context, so nothing but the id.
    add_deletions(1, project="42")

    run_sweep(cleanup_scheduler)

    (message,) = queued(broker, "git_refs")
    assert (message.actor_name, message.args, message.kwargs) == (project_cleanup.name, (42,), {})
    assert message.options["trigger"] == "parent"


def test_children_record_their_parent_as_trigger(
    broker: RedisBroker, add_deletions: AddDeletions, repository: MakeRepository, pending: Pending, postgres: Database
) -> None:
    # 前後の処理との関連
    bare = [repository("refs/heads/1", "refs/heads/2", project_id=project) for project in (1, 2)]
    add_deletions(2, project="1")
    add_deletions(2, project="2")
    run_sweep(cleanup_scheduler)

    with working(broker):
        eventually(lambda: not queued(broker, "git_refs"))

    assert [each.refs() for each in bare] == [[], []]
    assert pending() == []
    rows = Run.select(Run.trigger, Run.outcome, Run.counts).where(Run.worker == project_cleanup.name).tuples()
    assert list(rows) == [("parent", "done", {"total_deletes": 2, "invalid": 0, "failed": 0})] * 2


def test_second_run_finds_queued_messages(broker: RedisBroker, add_deletions: AddDeletions) -> None:
    # 備考: idempotent!
    add_deletions(250, project="n")
    run_sweep(cleanup_scheduler)

    result = run_sweep(cleanup_scheduler)

    assert result.counts == {"total_projects": 250, "enqueued": 0, "deduplicated": 250}
    assert len(enqueued(broker)) == 250


def test_scheduler_changes_no_rows(broker: RedisBroker, add_deletions: AddDeletions) -> None:
    # トランザクション仕様: なし (スケジューリングのみ)
    add_deletions(20, project="n % 3")
    before = list(Deletion.select().order_by(Deletion.id).dicts())

    run_sweep(cleanup_scheduler)

    assert list(Deletion.select().order_by(Deletion.id).dicts()) == before


def test_backlog_of_all_projects_needs_no_argument(add_deletions: AddDeletions) -> None:
    # As `housekeeping status` asks.
    add_deletions(12, project="n % 3")
    (projects,), (rows,) = cleanup_scheduler.stages_for_run(), project_cleanup.stages_for_run()
    now = ManualClock().now()

    assert (projects.backlog(now, 100).rows, rows.backlog(now, 100).rows) == (3, 12)
    assert rows.backlog(now, 11).exact is False
    assert projects.oldest(now) == Deletion.select(fn.MIN(Deletion.created_at)).scalar()
    assert rows.oldest(now) is None


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


def test_run_stops_at_its_time_limit(broker: RedisBroker, add_deletions: AddDeletions, settings: Settings) -> None:
    # パフォーマンス要件: 目標処理時間 10分以内; the next run continues.
    add_deletions(3 * BATCH_SIZE, project="n")

    result = run_sweep(cleanup_scheduler, clock=ManualClock(tick=2 * MAX_RUNTIME))

    assert (result.outcome, result.reason) == ("partial", "out_of_time")
    assert drain(broker, settings) == list(range(1, BATCH_SIZE + 1))
    run_sweep(sized(BATCH_SIZE))
    assert enqueued(broker) == list(range(BATCH_SIZE + 1, 2 * BATCH_SIZE + 1))


def test_project_resumes_within_ten_minutes_after_an_outage(
    broker: RedisBroker,
    add_deletions: AddDeletions,
    repository: MakeRepository,
    root: Path,
    pending: Pending,
    redis_client: redis.Redis,
) -> None:
    # R1: however often it has failed
    bare = repository("refs/heads/1")
    add_deletions(1, "'refs/heads/' || n")
    backends.use_root(None)
    old = actor_named(project_cleanup.name).send_with_options(args=(1,), retries=20)
    step_worker = StepWorker(broker, "git_refs")
    step_worker.run()
    [waiting] = queued(broker, "git_refs.DQ")
    backends.use_root(root)

    result = run_sweep(cleanup_scheduler)
    step_worker.come_due()
    step_worker.run()

    assert waiting.message_id == old.message_id
    assert waiting.options["eta"] - current_millis() <= 600_000
    assert result.counts == {"total_projects": 1, "enqueued": 0, "deduplicated": 1}
    assert (bare.refs(), pending(), queued(broker, "git_refs.DQ")) == ([], [], [])
    runs = Run.select().where(Run.worker == project_cleanup.name).order_by(Run.id)
    assert [run.outcome for run in runs] == ["failed", "done"]


@pytest.mark.redis_broker_only(reason="it breaks a command of the Redis broker")
def test_projects_enqueued_before_a_queue_outage_are_counted(broker: RedisBroker, add_deletions: AddDeletions) -> None:
    add_deletions(9, project="n")

    with redis_fault('"args":[7]'):  # in the third batch
        first = run_sweep(sized(100, 3))
    second = run_sweep(sized(100, 3))

    assert (first.outcome, first.counts["total_projects"]) == ("failed", 6)
    # It resumes behind them, and wraps around.
    assert second.counts == {"total_projects": 9, "enqueued": 3, "deduplicated": 6}
    assert enqueued(broker) == list(range(1, 10))
