"""Document 48, section by section: each test names its section."""

from __future__ import annotations

import pytest

from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.conftest import AddStatuses
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.workers import status_sweep as sweep
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
    "count", [0, 1, sweep.limits.batch - 1, sweep.limits.batch, sweep.limits.batch + 1, 3 * sweep.limits.batch]
)
def test_all_due_rows_are_deleted(add_statuses: AddStatuses, clock: ManualClock, count: int) -> None:
    # 処理フロー: ends when a batch deletes fewer than 100.
    add_statuses(count, NOW)

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", count)
    assert result.counts["batches"] == -(-count // sweep.limits.batch)
    assert ids() == []


def test_run_stops_after_30_seconds(add_statuses: AddStatuses) -> None:
    # パフォーマンス要件: 30 s. The clock moves 15 s at each look: 15, 30 and 45 s are spent; 30 s is still inside.
    clock = ManualClock(tick=sweep.limits.runtime / 2)
    add_statuses(10 * sweep.limits.batch, NOW)

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.reason) == ("partial", "out_of_time")
    assert result.counts == {"deleted_rows": 3 * sweep.limits.batch, "batches": 3, "out_of_time": True}


def test_short_batch_ends_the_run(add_statuses: AddStatuses) -> None:
    clock = ManualClock(tick=2 * sweep.limits.runtime)
    add_statuses(sweep.limits.batch - 1, NOW)

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["out_of_time"]) == ("done", False)


def test_interrupted_run_has_deleted_the_oldest_rows(add_statuses: AddStatuses) -> None:
    add_statuses(sweep.limits.batch, NOW)
    add_statuses(sweep.limits.batch, f"{NOW} - interval '1 day'", first_id=sweep.limits.batch + 1)

    run_sweep(sweep, clock=ManualClock(tick=2 * sweep.limits.runtime))

    assert ids() == list(range(1, sweep.limits.batch + 1))


def test_nested_loop_deletes_no_more_than_the_batch(postgres: Database, add_statuses: AddStatuses) -> None:
    add_statuses(10 * sweep.limits.batch, NOW)
    set_in_session(postgres, "enable_hashjoin = off", "enable_mergejoin = off", "enable_hashagg = off")
    set_in_session(postgres, "enable_material = off", "enable_sort = off")
    # PostgreSQL 13 has none of it.
    postgres.execute_sql("SELECT set_config(name, 'off', false) FROM pg_settings WHERE name = 'enable_memoize'")

    result = run_sweep(sweep, clock=ManualClock(tick=2 * sweep.limits.runtime))

    assert result.counts["deleted_rows"] == sweep.limits.batch
    assert len(ids()) == 9 * sweep.limits.batch
