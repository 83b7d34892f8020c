"""Document 58, section by section: each test names its section."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import connection as Connection

from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.integration.middleware.applications import eventually, queued, working
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, Pending
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository
from tests.integration.workers.batched_git_ref_updates.scheduled import NONE, enqueued
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.ledger import Run
from tests.internals.workers import cleanup_scheduler, project_cleanup


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


def test_project_done_meanwhile_costs_an_empty_run(
    broker: RedisBroker, add_deletions: AddDeletions, root: Path, admin: Connection
) -> None:
    add_deletions(1, project="1")
    run_sweep(cleanup_scheduler)
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE {Deletion._meta.table_name} SET status = 2")

    with working(broker):
        eventually(lambda: not queued(broker, "git_refs"))

    (run,) = Run.select().where(Run.worker == project_cleanup.name)
    assert (run.outcome, run.counts) == ("done", {"total_deletes": 0, "invalid": 0, "failed": 0})


def test_concurrent_runs_enqueue_each_project_once(
    broker: RedisBroker, add_deletions: AddDeletions, postgres: Database
) -> None:
    # 排他制御
    add_deletions(300, project="n")
    start, outcomes = threading.Barrier(2), list[tuple[str, str | None]]()

    def run() -> None:
        with postgres.connection_context():
            start.wait(timeout=10)
            result = run_sweep(cleanup_scheduler)
            outcomes.append((result.outcome, result.reason))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert ("done", None) in outcomes
    assert set(outcomes) <= {("done", None), ("skipped", "lease_held")}
    assert enqueued(broker) == list(range(1, 301))


def test_run_ended_line_has_the_counts(
    broker: RedisBroker, add_deletions: AddDeletions, caplog: pytest.LogCaptureFixture
) -> None:
    # ログ出力: stats at the end; 処理フロー 7.
    caplog.set_level(logging.INFO)
    add_deletions(2, project="n")

    run_sweep(cleanup_scheduler)

    (line,) = [record for record in caplog.records if record.message == "Run ended"]
    assert (line.total_projects, line.enqueued, line.deduplicated) == (2, 2, 0)  # type: ignore[attr-defined]


def test_scheduler_changes_no_rows(broker: RedisBroker, add_deletions: AddDeletions) -> None:
    # トランザクション仕様: なし (スケジューリングのみ)
    add_deletions(20, project="n % 3")
    before = list(Deletion.select().order_by(Deletion.id).dicts())

    run_sweep(cleanup_scheduler)

    assert list(Deletion.select().order_by(Deletion.id).dicts()) == before
