"""Document 58, section by section: each test names the section it keeps."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from dramatiq import Actor
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import connection as Connection

from housekeeping import embedded
from housekeeping.foundation.db import Database
from housekeeping.foundation.leases import ExclusiveLease
from housekeeping.foundation.settings import Settings
from housekeeping.sweeps import actors
from housekeeping.sweeps.actor import register
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import Counts
from housekeeping.sweeps.own_tables import Run
from housekeeping.sweeps.run import perform
from housekeeping.testing import ManualClock
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from housekeeping.workers.batched_git_ref_updates.worker import (
    BATCH_SIZE,
    LEASE_TTL,
    MAX_RUNTIME,
    SWEEPS,
    cleanup_scheduler,
    project_cleanup,
)
from tests.integration.batched_git_ref_updates.conftest import AddDeletions, Pending
from tests.integration.batched_git_ref_updates.repositories import MakeRepository
from tests.integration.middleware.applications import close_all, eventually, installed, queued, working

NONE = {"total_projects": 0, "enqueued": 0, "deduplicated": 0}


def sized(max_projects: int, batch_size: int = BATCH_SIZE) -> Sweep:
    """The scheduler with other limits."""
    return dataclasses.replace(cleanup_scheduler, batch_size=batch_size, options={"max_projects": max_projects})


@pytest.fixture
def broker(settings: Settings, deletions: type[Deletion], redis_client: redis.Redis) -> Iterator[RedisBroker]:
    """The application's broker with this family's actors."""
    broker = installed(settings.model_copy(update={"database_url": None}))
    for sweep in SWEEPS:
        register(broker, sweep)
    yield broker
    close_all()


def enqueued(broker: RedisBroker) -> list[int]:
    """The projects whose cleanup waits."""
    return sorted(message.args[0] for message in queued(broker, "git_refs"))


def drain(broker: RedisBroker, settings: Settings) -> list[int]:
    """The same, and then none waits any more."""
    projects = enqueued(broker)
    broker.flush("git_refs")
    broker.client.delete(*broker.client.scan_iter(match=f"{settings.namespace}:dedup:*"))
    return projects


def test_each_project_with_pending_rows_is_enqueued_once(
    broker: RedisBroker, add_deletions: AddDeletions, admin: Connection
) -> None:
    # 処理フロー 3, 4, 5; データベース操作仕様: status = pending, each project_id once.
    add_deletions(30, project="1 + n % 3")
    add_deletions(5, project="7")
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE {Deletion._meta.table_name} SET status = 2 WHERE project_id = 7")

    result = perform(cleanup_scheduler)

    assert (result.outcome, result.reason) == ("done", None)
    assert result.counts == {"total_projects": 3, "enqueued": 3, "deduplicated": 0}
    assert enqueued(broker) == [1, 2, 3]


def test_nothing_pending_is_nothing_to_do(broker: RedisBroker) -> None:
    # 実行可否判定
    result = perform(cleanup_scheduler)

    assert (result.outcome, result.counts) == ("done", NONE)
    assert enqueued(broker) == []


def test_the_messages_are_the_project_cleanups(broker: RedisBroker, add_deletions: AddDeletions) -> None:
    # 出力仕様: ProjectCleanupWorkerキュー; 備考: without context, so nothing but the id.
    add_deletions(1, project="42")

    perform(cleanup_scheduler)

    (message,) = queued(broker, "git_refs")
    assert (message.actor_name, message.args, message.kwargs) == (project_cleanup.name, (42,), {})
    assert message.options["trigger"] == "parent"


def test_the_children_do_the_work_and_their_rows_name_the_parent(
    broker: RedisBroker, add_deletions: AddDeletions, repository: MakeRepository, pending: Pending, postgres: Database
) -> None:
    # 前後の処理との関連
    bare = [repository("refs/heads/1", "refs/heads/2", project_id=project) for project in (1, 2)]
    add_deletions(2, project="1")
    add_deletions(2, project="2")
    perform(cleanup_scheduler)

    with working(broker):
        eventually(lambda: not queued(broker, "git_refs"))

    assert [each.refs() for each in bare] == [[], []]
    assert pending() == []
    rows = Run.select(Run.trigger, Run.outcome, Run.counts).where(Run.worker == project_cleanup.name).tuples()
    assert list(rows) == [("parent", "done", {"total_deletes": 2, "invalid": 0, "failed": 0})] * 2


@pytest.mark.parametrize("count", [1, BATCH_SIZE - 1, BATCH_SIZE, BATCH_SIZE + 1, 3 * BATCH_SIZE])
def test_every_project_is_enqueued_whatever_their_number(
    broker: RedisBroker, add_deletions: AddDeletions, count: int
) -> None:
    # パフォーマンス要件: in batches of 100.
    add_deletions(count, project="n")
    seen: list[int] = []

    result = perform(cleanup_scheduler, on_batch=lambda counts: seen.append(counts["total_projects"]))

    assert (result.outcome, result.counts["enqueued"]) == ("done", count)
    assert seen == [*range(BATCH_SIZE, count, BATCH_SIZE), count]
    assert enqueued(broker) == list(range(1, count + 1))


@pytest.mark.parametrize(("count", "outcome"), [(9, "done"), (10, "done"), (11, "partial"), (40, "partial")])
@pytest.mark.parametrize("batch_size", [3, 5, 10, 100])
def test_a_run_ends_at_its_limit_of_projects(
    broker: RedisBroker, add_deletions: AddDeletions, count: int, outcome: str, batch_size: int
) -> None:
    # 処理フロー 6: MAX_PROJECTS; here 10.
    add_deletions(count, project="n")

    result = perform(sized(10, batch_size))

    assert (result.outcome, result.reason) == (outcome, "limit" if outcome == "partial" else None)
    assert result.counts["total_projects"] == min(count, 10)
    assert enqueued(broker) == list(range(1, min(count, 10) + 1))


def test_the_next_run_goes_on_after_the_last_project_and_ends_where_it_began(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings
) -> None:
    # workers.md, 58: high ids do not starve.
    add_deletions(25, project="n")
    rounds = []
    for _ in range(4):
        result = perform(sized(10, 4))
        rounds.append((result.outcome, result.counts["total_projects"], drain(broker, settings)))

    assert rounds == [
        ("partial", 10, list(range(1, 11))),
        ("partial", 10, list(range(11, 21))),
        ("partial", 10, [*range(1, 6), *range(21, 26)]),
        ("partial", 10, list(range(6, 16))),
    ]


@pytest.mark.parametrize("batch_size", [1, 4, 10, 25, 100])
def test_a_run_that_wraps_meets_each_project_once_and_no_more(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings, batch_size: int
) -> None:
    add_deletions(25, project="n")
    perform(sized(10, batch_size))
    drain(broker, settings)

    result = perform(sized(1000, batch_size))

    assert (result.outcome, result.counts) == ("done", {"total_projects": 25, "enqueued": 25, "deduplicated": 0})
    assert enqueued(broker) == list(range(1, 26))


def test_after_a_whole_round_a_run_begins_at_the_front(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings
) -> None:
    add_deletions(15, project="n")
    for expected in (list(range(1, 11)), [*range(1, 6), *range(11, 16)]):
        perform(sized(10))
        assert drain(broker, settings) == expected
    perform(sized(100))
    drain(broker, settings)

    perform(sized(10))

    assert enqueued(broker) == list(range(1, 11))


def test_the_limit_exactly_at_the_place_where_the_run_began_is_a_whole_round(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings
) -> None:
    add_deletions(20, project="n")
    perform(sized(10))
    drain(broker, settings)

    result = perform(sized(20, 7))

    assert (result.outcome, result.counts["total_projects"]) == ("done", 20)


def test_the_place_to_go_on_from_may_be_gone(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings, admin: Connection
) -> None:
    add_deletions(25, project="n")
    perform(sized(10))
    drain(broker, settings)
    with admin.cursor() as cursor:
        cursor.execute(f"DELETE FROM {Deletion._meta.table_name} WHERE project_id BETWEEN 5 AND 12")

    result = perform(sized(100))

    assert (result.outcome, enqueued(broker)) == ("done", [*range(1, 5), *range(13, 26)])


def test_low_projects_that_are_never_done_do_not_keep_high_ones_waiting(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings
) -> None:
    add_deletions(100, project="n")
    seen: set[int] = set()
    for _ in range(10):
        perform(sized(10, 3))
        seen |= set(drain(broker, settings))

    assert seen == set(range(1, 101))


def test_a_run_that_broke_off_is_gone_on_from(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings
) -> None:
    # 障害時対応
    add_deletions(9, project="n")

    def fail(counts: Counts) -> None:
        if counts["total_projects"] == 6:
            raise OSError("the disk is full")

    first = perform(sized(100, 3), on_batch=fail)
    drain(broker, settings)
    second = perform(sized(4, 3))

    assert (first.outcome, second.outcome) == ("failed", "partial")
    assert enqueued(broker) == [1, 7, 8, 9]


def test_a_second_run_finds_the_messages_waiting(broker: RedisBroker, add_deletions: AddDeletions) -> None:
    # 備考: idempotent!
    add_deletions(250, project="n")
    perform(cleanup_scheduler)

    result = perform(cleanup_scheduler)

    assert result.counts == {"total_projects": 250, "enqueued": 0, "deduplicated": 250}
    assert len(enqueued(broker)) == 250


def test_a_project_whose_cleanup_failed_has_one_message_and_no_more(
    broker: RedisBroker, add_deletions: AddDeletions, redis_client: redis.Redis
) -> None:
    # A repository that stays broken must not pile up a message a minute, with 25 retries each. No root is set here.
    add_deletions(1, project="1")
    perform(cleanup_scheduler)
    with working(broker):
        eventually(lambda: Run.select().where(Run.worker == project_cleanup.name, Run.outcome == "failed").count())
        eventually(lambda: len(queued(broker, "git_refs.DQ")) == 1)

    result = perform(cleanup_scheduler)

    assert result.counts == {"total_projects": 1, "enqueued": 0, "deduplicated": 1}


def test_a_project_that_is_done_between_reading_and_running_costs_an_empty_run(
    broker: RedisBroker, add_deletions: AddDeletions, root: Path, admin: Connection
) -> None:
    add_deletions(1, project="1")
    perform(cleanup_scheduler)
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE {Deletion._meta.table_name} SET status = 2")

    with working(broker):
        eventually(lambda: not queued(broker, "git_refs"))

    (run,) = Run.select().where(Run.worker == project_cleanup.name)
    assert (run.outcome, run.counts) == ("done", {"total_deletes": 0, "invalid": 0, "failed": 0})


def test_a_run_whose_lease_is_held_elsewhere_ends_at_once(
    broker: RedisBroker, add_deletions: AddDeletions, caplog: pytest.LogCaptureFixture
) -> None:
    # 実行条件, 排他制御, エラーケース一覧 (リース取得失敗): skipped, never waits.
    caplog.set_level(logging.INFO)
    add_deletions(1, project="1")

    with ExclusiveLease("batched_git_ref_updates/cleanup_scheduler", timedelta(minutes=10)):
        result = perform(cleanup_scheduler)

    assert (result.outcome, result.reason, result.exit_code) == ("skipped", "lease_held", 0)
    assert enqueued(broker) == []
    (line,) = [record for record in caplog.records if record.message == "Lease is held elsewhere"]
    assert line.levelname == "INFO"


def test_two_runs_at_once_enqueue_each_project_once(
    broker: RedisBroker, add_deletions: AddDeletions, postgres: Database
) -> None:
    # 排他制御
    add_deletions(300, project="n")
    start, outcomes = threading.Barrier(2), list[tuple[str, str | None]]()

    def run() -> None:
        with postgres.connection_context():
            start.wait(timeout=10)
            result = perform(cleanup_scheduler)
            outcomes.append((result.outcome, result.reason))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert ("done", None) in outcomes
    assert set(outcomes) <= {("done", None), ("skipped", "lease_held")}
    assert enqueued(broker) == list(range(1, 301))


def test_the_run_stops_when_its_time_is_over(
    broker: RedisBroker, add_deletions: AddDeletions, settings: Settings
) -> None:
    # パフォーマンス要件: 目標処理時間 10分以内; the next run goes on.
    add_deletions(3 * BATCH_SIZE, project="n")

    result = perform(cleanup_scheduler, clock=ManualClock(tick=2 * MAX_RUNTIME))

    assert (result.outcome, result.reason) == ("partial", "out_of_time")
    assert drain(broker, settings) == list(range(1, BATCH_SIZE + 1))
    perform(sized(BATCH_SIZE))
    assert enqueued(broker) == list(range(BATCH_SIZE + 1, 2 * BATCH_SIZE + 1))


def test_the_end_line_carries_the_counts(
    broker: RedisBroker, add_deletions: AddDeletions, caplog: pytest.LogCaptureFixture
) -> None:
    # ログ出力: stats at the end; 処理フロー 7.
    caplog.set_level(logging.INFO)
    add_deletions(2, project="n")

    perform(cleanup_scheduler)

    (line,) = [record for record in caplog.records if record.message == "Run ended"]
    assert (line.total_projects, line.enqueued, line.deduplicated) == (2, 2, 0)  # type: ignore[attr-defined]


def test_nothing_of_the_table_is_changed(broker: RedisBroker, add_deletions: AddDeletions) -> None:
    # トランザクション仕様: なし (スケジューリングのみ)
    add_deletions(20, project="n % 3")
    before = list(Deletion.select().order_by(Deletion.id).dicts())

    perform(cleanup_scheduler)

    assert list(Deletion.select().order_by(Deletion.id).dicts()) == before


def test_the_queue_away_fails_the_run_and_the_next_does_its_work(
    settings: Settings, redis_client: redis.Redis, add_deletions: AddDeletions, last_run: Callable[[], Any]
) -> None:
    # リトライ仕様: すべての例外
    add_deletions(3, project="n")
    with embedded.start(postgres=False) as servers:
        broker = installed(settings.model_copy(update={"broker_url": servers.redis_url, "database_url": None}))
        register(broker, project_cleanup)
        servers.stop("redis")
        result = perform(cleanup_scheduler)
    close_all()

    assert result.outcome == "failed"
    assert result.reason is not None and result.reason.startswith("Redis did not answer")
    assert result.counts == NONE
    assert (last_run().outcome, last_run().counts.get("total_projects", 0)) == ("failed", 0)


def test_redis_away_altogether_runs_nothing(
    settings: Settings, postgres: Database, add_deletions: AddDeletions
) -> None:
    # L5: an unreachable lease is not a free one.
    with embedded.start(postgres=False) as servers:
        broker = installed(settings.model_copy(update={"redis_url": servers.redis_url, "database_url": None}))
        register(broker, project_cleanup)
        servers.stop("redis")
        add_deletions(1)

        result = perform(cleanup_scheduler)
    close_all()

    assert result.outcome == "failed"
    assert result.reason is not None and "Redis did not answer" in result.reason


def test_a_database_that_goes_away_fails_the_run_and_it_is_retried(
    broker: RedisBroker, add_deletions: AddDeletions, admin: Connection, settings: Settings
) -> None:
    # エラーケース一覧: DB接続エラー
    add_deletions(3, project="n")

    def cut(counts: Counts) -> None:
        with admin.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {Deletion._meta.table_name} RENAME TO away")
            cursor.execute(
                "CREATE FUNCTION gone() RETURNS bigint LANGUAGE plpgsql VOLATILE AS "
                "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN 1; END $$;"
                f"CREATE VIEW {Deletion._meta.table_name} AS SELECT gone() AS project_id, 1 AS status, 1 AS id"
            )

    result = perform(sized(10, 1), on_batch=cut)

    assert result.outcome == "failed"
    assert result.reason is not None and result.reason.startswith("database: ")
    assert enqueued(broker) == [1]
    assert result.error is not None, "the message is retried"


def test_without_a_broker_it_says_what_is_missing(add_deletions: AddDeletions) -> None:
    actors.forget_all()
    add_deletions(1)

    result = perform(cleanup_scheduler)

    assert result.outcome == "failed"
    assert result.reason is not None and "housekeeping.install(broker)" in result.reason


def test_the_schedule_the_limits_and_the_labels_are_the_documents(broker: RedisBroker) -> None:
    # 実行スケジュール, 入力パラメータ, 排他制御, リトライ仕様, 備考
    lease = cleanup_scheduler.lease
    assert lease is not None
    assert (lease.key, lease.ttl) == ("batched_git_ref_updates/cleanup_scheduler", timedelta(minutes=10))
    assert cleanup_scheduler.schedule == "* * * * *"
    assert (cleanup_scheduler.batch_size, cleanup_scheduler.options["max_projects"]) == (100, 10_000)
    assert (cleanup_scheduler.feature_category, cleanup_scheduler.data_consistency) == ("gitaly", "sticky")
    assert cleanup_scheduler.counts == ("total_projects", "enqueued", "deduplicated")
    assert (cleanup_scheduler.queue, cleanup_scheduler.takes_argument) == ("cronjob", None)
    assert cleanup_scheduler.max_runtime < LEASE_TTL
    for sweep in SWEEPS:
        actor: Actor[..., Any] = broker.actors[sweep.name]
        assert (actor.options["max_retries"], actor.options["idempotent"]) == (25, True)
