"""Scheduler during outages and with failing cleanups; each names its section of document 58."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.faults import redis_fault
from tests.integration.middleware.applications import close_all, eventually, installed, queued, working
from tests.integration.middleware.step_worker import StepWorker
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, Pending
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository
from tests.integration.workers.batched_git_ref_updates.scheduled import NONE, drain, enqueued, sized
from tests.internals.embedded import embedded
from tests.internals.engine import actor_named, actor_registry, register, run_sweep
from tests.internals.ledger import Counts, Run
from tests.internals.workers import backends, cleanup_scheduler, project_cleanup


def test_interrupted_run_is_resumed(broker: RedisBroker, add_deletions: AddDeletions, settings: Settings) -> None:
    # 障害時対応
    add_deletions(26, project="n")

    def fail(counts: Counts) -> None:
        if counts["total_projects"] == 20:
            raise OSError("the disk is full")

    first = run_sweep(sized(100, 1), on_batch=fail)
    drain(broker, settings)
    second = run_sweep(sized(7, 1))

    assert (first.outcome, second.outcome) == ("failed", "partial")
    assert enqueued(broker) == [1, *range(21, 27)]


def test_failing_project_has_one_message_only(
    broker: RedisBroker, add_deletions: AddDeletions, redis_client: redis.Redis
) -> None:
    # A repository that stays broken must not pile up a message a minute, with 25 retries each. No root is set here.
    add_deletions(1, project="1")
    run_sweep(cleanup_scheduler)
    with working(broker):
        eventually(lambda: Run.select().where(Run.worker == project_cleanup.name, Run.outcome == "failed").count())
        eventually(lambda: len(queued(broker, "git_refs.DQ")) == 1)

    result = run_sweep(cleanup_scheduler)

    assert result.counts == {"total_projects": 1, "enqueued": 0, "deduplicated": 1}


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


def test_queue_outage_fails_the_run_and_the_next_recovers(
    settings: Settings, redis_client: redis.Redis, add_deletions: AddDeletions, last_run: Callable[[], Any]
) -> None:
    # リトライ仕様: すべての例外
    add_deletions(3, project="n")
    with embedded.start(postgres=False) as servers:
        broker = installed(settings.model_copy(update={"broker_url": servers.redis_url, "database_url": None}))
        register(broker, project_cleanup)
        servers.stop("redis")
        result = run_sweep(cleanup_scheduler)
    close_all()

    assert result.outcome == "failed"
    assert result.reason is not None and result.reason.startswith("Redis did not answer")
    assert result.counts == NONE
    assert (last_run().outcome, last_run().counts.get("total_projects", 0)) == ("failed", 0)


def test_database_outage_fails_the_run_for_a_retry(
    broker: RedisBroker, add_deletions: AddDeletions, admin: Connection, settings: Settings
) -> None:
    # エラーケース一覧: DB接続エラー
    add_deletions(12, project="n")

    def cut(counts: Counts) -> None:
        with admin.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {Deletion._meta.table_name} RENAME TO away")
            cursor.execute(
                "CREATE FUNCTION gone() RETURNS bigint LANGUAGE plpgsql VOLATILE AS "
                "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN 1; END $$;"
                f"CREATE VIEW {Deletion._meta.table_name} AS SELECT gone() AS project_id, 1 AS status, 1 AS id"
            )

    result = run_sweep(sized(12, 1), on_batch=cut)

    assert result.outcome == "failed"
    assert result.reason is not None and result.reason.startswith("database: ")
    assert enqueued(broker) == list(range(1, 11))
    assert result.error is not None, "the message is retried"


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


def test_missing_broker_is_reported(add_deletions: AddDeletions) -> None:
    actor_registry.forget_all()
    add_deletions(1)

    result = run_sweep(cleanup_scheduler)

    assert result.outcome == "failed"
    assert result.reason is not None and "housekeeping.install(broker)" in result.reason
