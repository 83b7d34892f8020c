"""Concurrent sessions and runs, and the end of a run (document 6): each test names its section."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping.leases.lease import ExclusiveLease
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.testing import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from housekeeping.workers.ci_stuck_builds.worker import BATCH_SIZE, MAX_RUNTIME, drop_canceling
from tests.integration.conftest import Locked
from tests.integration.pausing import changed_in_the_gap, pausing
from tests.integration.workers.ci_stuck_builds.tables import NOTHING_DROPPED, STALE, AddBuilds, by_status


def test_build_that_ends_between_read_and_write_is_skipped(
    either: type[Build], add_builds: AddBuilds, admin: Connection
) -> None:
    # エラーケース OptimisticLocking: the change commits after the statement's snapshot and before the row is locked.
    add_builds(3, "canceling", STALE, STALE)
    change = f"UPDATE {_table(either)} SET status = 'canceled', lock_version = lock_version + 1 WHERE id = 2"

    with changed_in_the_gap(admin, change):
        result = run_sweep(pausing(drop_canceling, Build.id, 2), clock=ManualClock())

    assert result.counts == {**NOTHING_DROPPED, "dropped": 2}
    assert by_status() == {"failed": [1, 3], "canceled": [2]}


def test_build_with_a_new_version_is_read_again_and_dropped(
    either: type[Build], add_builds: AddBuilds, admin: Connection
) -> None:
    # リトライ仕様: 即時. What is locked is the version that is compared, so nothing of the other's change is lost.
    add_builds(1, "canceling", STALE, STALE)

    with changed_in_the_gap(admin, f"UPDATE {_table(either)} SET lock_version = 10, runner_id = 77 WHERE id = 1"):
        result = run_sweep(pausing(drop_canceling, Build.id, 1), clock=ManualClock())

    build = Build.get(Build.id == 1)
    assert result.counts == {**NOTHING_DROPPED, "dropped": 1}
    assert (build.status, build.lock_version, build.runner_id) == ("failed", 11, 77)


def _table(model: type[Build]) -> str:
    meta: Any = model._meta
    return str(meta.table_name)


def test_locked_build_is_left_for_the_next_run(
    either: type[Build], add_builds: AddBuilds, locked: Locked, clock: ManualClock
) -> None:
    # 障害時対応: had it waited, lock_timeout would have failed the run.
    add_builds(3, "canceling", STALE, STALE)
    meta: Any = Build._meta

    with locked(f"SELECT * FROM {meta.table_name} WHERE id = 1 FOR UPDATE"):
        first = run_sweep(drop_canceling, clock=clock)
    second = run_sweep(drop_canceling, clock=clock)

    assert (first.outcome, first.counts["dropped"]) == ("done", 2)
    assert (second.outcome, second.counts["dropped"]) == ("done", 1)


def test_a_second_run_changes_nothing(either: type[Build], add_builds: AddBuilds, clock: ManualClock) -> None:
    # 備考: idempotent!
    add_builds(5, "canceling", STALE, STALE)
    run_sweep(drop_canceling, clock=clock)

    assert run_sweep(drop_canceling, clock=clock).counts == NOTHING_DROPPED
    assert Build.select().where(Build.lock_version == 4).count() == 5


def test_run_is_skipped_while_its_lease_is_held(
    builds: type[Build],
    add_builds: AddBuilds,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
    last_run: Callable[[], Any],
) -> None:
    # 実行可否判定, 排他制御, エラーケース ExclusiveLease取得失敗: スキップ.
    add_builds(1, "canceling", STALE, STALE)

    with ExclusiveLease("ci/stuck_builds/drop_canceling", timedelta(minutes=30)):
        result = run_sweep(drop_canceling, clock=clock)

    assert (result.outcome, result.reason, result.exit_code) == ("skipped", "lease_held", 0)
    assert (last_run().outcome, last_run().reason) == ("skipped", "lease_held")
    assert by_status() == {"canceling": [1]}
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_lease_is_held_for_30_minutes_and_released(builds: type[Build], add_builds: AddBuilds) -> None:
    # 排他制御: TTL 30分, another than the parent's; 処理シーケンス 6: ロック解放.
    add_builds(1, "canceling", STALE, STALE)
    lease = ExclusiveLease("ci/stuck_builds/drop_canceling", timedelta(minutes=30))
    left: list[timedelta] = []

    run_sweep(
        drop_canceling, clock=ManualClock(), on_batch=lambda counts: left.append(lease.remaining() or timedelta())
    )

    assert timedelta(minutes=29) < left[0] <= timedelta(minutes=30)
    assert not lease.exists()


def test_run_stops_after_25_minutes(builds: type[Build], add_builds: AddBuilds) -> None:
    # 目標処理時間: 30分以内. 12.5, 25 and 37.5 min are spent; 25 min is still inside.
    add_builds(10 * BATCH_SIZE, "canceling", STALE, STALE)

    result = run_sweep(drop_canceling, clock=ManualClock(tick=MAX_RUNTIME / 2))

    assert (result.outcome, result.reason) == ("partial", "out_of_time")
    assert result.counts == {**NOTHING_DROPPED, "dropped": 3 * BATCH_SIZE, "out_of_time": True}


def test_interrupted_run_is_resumed_after_its_last_build(
    either: type[Build], add_builds: AddBuilds, clock: ManualClock
) -> None:
    # The place is kept as text and must be read back as UTC, whatever the session's zone.
    add_builds(350, "canceling", STALE, STALE)
    stopping = threading.Event()

    first = run_sweep(drop_canceling, clock=clock, stopping=stopping, on_batch=lambda counts: stopping.set())
    add_builds(1, "canceling", f"{STALE} - interval '1 day'", STALE, first_id=1000)
    second = run_sweep(drop_canceling, clock=clock)

    assert (first.outcome, first.reason, first.counts["dropped"]) == ("partial", "shutdown", 200)
    assert (second.outcome, second.counts["dropped"]) == ("done", 151), "and the one before its last build"
