"""Document 48, section by section: each test names its section."""

from __future__ import annotations

import dataclasses
import threading
from datetime import UTC, datetime, timedelta

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping.database.connection import Database
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.stages.stage import Batch
from housekeeping.sweeps.stages.table_stage import TableStage
from housekeeping.testing import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from housekeeping.workers.user_status_cleanup.worker import sweep
from tests.integration.conftest import AddStatuses, Locked
from tests.integration.pausing import changed_in_the_gap, pausing
from tests.session_settings import set_in_session

#: The manual clock's time, in SQL.
NOW = "timestamptz '2026-01-01 00:00:00+00'"


def ids() -> list[int]:
    return [row.user_id for row in UserStatus.select(UserStatus.user_id).order_by(UserStatus.user_id)]


def test_only_due_statuses_are_deleted(add_statuses: AddStatuses, clock: ManualClock) -> None:
    # データベース操作仕様: scheduled_for_cleanup is clear_status_at <= now; null never clears itself.
    add_statuses(1, f"{NOW} - interval '1 microsecond'", first_id=1)
    add_statuses(1, NOW, first_id=2)
    add_statuses(1, f"{NOW} + interval '1 microsecond'", first_id=3)
    add_statuses(1, "NULL", first_id=4)

    result = run_sweep(sweep, clock=clock)

    assert result.counts == {"deleted_rows": 2, "batches": 1, "out_of_time": False}
    assert ids() == [3, 4]


@pytest.mark.parametrize(
    "count", [0, 1, sweep.batch_size - 1, sweep.batch_size, sweep.batch_size + 1, 3 * sweep.batch_size]
)
def test_all_due_rows_are_deleted(add_statuses: AddStatuses, clock: ManualClock, count: int) -> None:
    # 処理フロー: ends when a batch deletes fewer than 100.
    add_statuses(count, NOW)

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", count)
    assert result.counts["batches"] == -(-count // sweep.batch_size)
    assert ids() == []


def test_run_stops_after_30_seconds(add_statuses: AddStatuses) -> None:
    # パフォーマンス要件: 30 s. The clock moves 15 s at each look: 15, 30 and 45 s are spent; 30 s is still inside.
    clock = ManualClock(tick=sweep.max_runtime / 2)
    add_statuses(10 * sweep.batch_size, NOW)

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.reason) == ("partial", "out_of_time")
    assert result.counts == {"deleted_rows": 3 * sweep.batch_size, "batches": 3, "out_of_time": True}


def test_short_batch_ends_the_run(add_statuses: AddStatuses) -> None:
    clock = ManualClock(tick=2 * sweep.max_runtime)
    add_statuses(sweep.batch_size - 1, NOW)

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["out_of_time"]) == ("done", False)


def test_interrupted_run_has_deleted_the_oldest_rows(add_statuses: AddStatuses) -> None:
    add_statuses(sweep.batch_size, NOW)
    add_statuses(sweep.batch_size, f"{NOW} - interval '1 day'", first_id=sweep.batch_size + 1)

    run_sweep(sweep, clock=ManualClock(tick=2 * sweep.max_runtime))

    assert ids() == list(range(1, sweep.batch_size + 1))


def test_locked_rows_are_skipped_without_waiting(add_statuses: AddStatuses, locked: Locked, clock: ManualClock) -> None:
    # 排他制御: FOR UPDATE SKIP LOCKED. Had it waited, lock_timeout would have failed the run.
    add_statuses(3, NOW)

    with locked("SELECT * FROM user_statuses WHERE user_id = 1 FOR UPDATE"):
        result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 2)
    assert ids() == [1]


def test_next_run_processes_rows_that_were_locked(
    add_statuses: AddStatuses, locked: Locked, clock: ManualClock
) -> None:
    # 障害時対応: the next minute's run processes again.
    add_statuses(3, NOW)
    with locked("SELECT * FROM user_statuses WHERE user_id = 1 FOR UPDATE"):
        run_sweep(sweep, clock=clock)

    assert run_sweep(sweep, clock=clock).counts["deleted_rows"] == 1
    assert ids() == []


def test_concurrent_runs_delete_each_row_once(
    postgres: Database, add_statuses: AddStatuses, locked: Locked, admin: Connection
) -> None:
    add_statuses(100_000, "now() - interval '1 second' * n")
    start, results = threading.Barrier(2), list[RunResult]()

    def run() -> None:
        with postgres.connection_context():
            start.wait(timeout=10)
            results.append(run_sweep(dataclasses.replace(sweep, batch_size=1000)))

    with locked("SELECT * FROM user_statuses WHERE user_id % 1000 = 7 FOR UPDATE"):
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)

    assert [result.outcome for result in results] == ["done", "done"]
    assert sum(result.counts["deleted_rows"] for result in results) == 100_000 - 100 - len(set(ids()) - _locked_ids())
    assert set(ids()) >= _locked_ids()
    assert all(result.counts["deleted_rows"] > 0 for result in results)


def _locked_ids() -> set[int]:
    return {n for n in range(1, 100_001) if n % 1000 == 7}


def test_nested_loop_deletes_no_more_than_the_batch(postgres: Database, add_statuses: AddStatuses) -> None:
    add_statuses(10 * sweep.batch_size, NOW)
    set_in_session(postgres, "enable_hashjoin = off", "enable_mergejoin = off", "enable_hashagg = off")
    set_in_session(postgres, "enable_material = off", "enable_sort = off")
    # PostgreSQL 13 has none of it.
    postgres.execute_sql("SELECT set_config(name, 'off', false) FROM pg_settings WHERE name = 'enable_memoize'")

    result = run_sweep(sweep, clock=ManualClock(tick=2 * sweep.max_runtime))

    assert result.counts["deleted_rows"] == sweep.batch_size
    assert len(ids()) == 9 * sweep.batch_size


def test_a_status_renewed_between_reading_and_deleting_stays(
    postgres: Database, add_statuses: AddStatuses, admin: Connection
) -> None:
    add_statuses(2, NOW)
    renew = "UPDATE user_statuses SET clear_status_at = now() + interval '1 day' WHERE user_id = 1"

    with changed_in_the_gap(admin, renew):
        result = run_sweep(pausing(sweep, UserStatus.user_id, 1), clock=ManualClock(now=datetime.now(UTC)))

    assert result.counts["deleted_rows"] == 1
    assert ids() == [1]


def test_a_second_run_finds_nothing_to_do(add_statuses: AddStatuses, clock: ManualClock) -> None:
    # 排他制御: idempotent!
    add_statuses(5, NOW)
    run_sweep(sweep, clock=clock)

    assert run_sweep(sweep, clock=clock).counts == {"deleted_rows": 0, "batches": 0, "out_of_time": False}


def test_sweep_uses_the_index(
    postgres: Database, add_statuses: AddStatuses, admin: Connection, clock: ManualClock
) -> None:
    add_statuses(50_000, f"{NOW} + interval '1 second' * (n - 1000)")
    with admin.cursor() as cursor:
        cursor.execute("ANALYZE user_statuses")
    (table,) = sweep.stages_for_run()
    assert isinstance(table, TableStage)
    after = (clock.now() - timedelta(seconds=500), 3)

    for position in (None, after):
        batch = Batch(sweep.name, None, clock.now(), position)
        sql, parameters = table.rows(batch).sql()
        plan = "\n".join(row[0] for row in postgres.execute_sql(f"EXPLAIN {sql}", parameters))
        assert "index_user_statuses_on_clear_status_at_not_null" in plan
        assert "Seq Scan" not in plan


def test_schedule_limits_and_labels_match_the_document() -> None:
    # 実行スケジュール, 備考
    assert sweep.schedule == "* * * * *"
    assert (sweep.batch_size, sweep.max_runtime) == (100, timedelta(seconds=30))
    assert (sweep.feature_category, sweep.data_consistency) == ("user_profile", "sticky")
    assert (sweep.alerts.longest_run, sweep.alerts.backlog) == (timedelta(seconds=60), 10_000)
