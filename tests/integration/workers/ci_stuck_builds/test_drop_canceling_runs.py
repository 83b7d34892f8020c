"""Concurrent sessions and runs, and the end of a run (document 6): each test names its section."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from psycopg2.extensions import connection as Connection

from housekeeping import ExclusiveLease
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from tests.integration.conftest import Locked
from tests.integration.pausing import changed_in_the_gap, pausing
from tests.integration.workers.ci_stuck_builds.tables import NOTHING_DROPPED, STALE, AddBuilds, by_status
from tests.internals.engine import run_sweep
from tests.internals.workers import BUILDS_BATCH_SIZE as BATCH_SIZE
from tests.internals.workers import BUILDS_MAX_RUNTIME as MAX_RUNTIME
from tests.internals.workers import drop_canceling


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


def test_build_with_an_artifact_being_added_is_dropped(
    builds: type[Build], add_builds: AddBuilds, admin: Connection, locked: Locked
) -> None:
    # The foreign key of the new row locks its build, but only its key.
    add_builds(2, "canceling", STALE, STALE)
    with admin.cursor() as cursor:
        cursor.execute("CREATE TABLE artifact (job_id bigint REFERENCES ci_builds (id))")

    with locked("INSERT INTO artifact VALUES (1)"):
        result = run_sweep(drop_canceling, clock=ManualClock())

    assert (result.outcome, result.counts["dropped"]) == ("done", 2)


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
