"""Dropped builds, their changes and their log lines (document 6), and the two siblings with other limits."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Sweep, events
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from tests.database_times import DatabaseTimes
from tests.declarations import changed
from tests.integration.pausing import changed_in_the_gap, pausing
from tests.integration.workers.ci_stuck_builds.tables import (
    HOUR_AGO,
    NOTHING_DROPPED,
    NOW,
    STALE,
    AddBuilds,
    by_status,
    lines,
)
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.workers import drop_canceling, drop_running, drop_scheduled
from tests.session_settings import set_in_session


def test_only_builds_created_and_updated_more_than_an_hour_ago_are_dropped(
    either: type[Build], add_builds: AddBuilds, clock: ManualClock
) -> None:
    # 処理シーケンス 3, 備考: both times, and strictly older.
    add_builds(1, "canceling", STALE, STALE, first_id=1)
    add_builds(1, "canceling", HOUR_AGO, STALE, first_id=2)
    add_builds(1, "canceling", STALE, HOUR_AGO, first_id=3)
    add_builds(1, "canceling", f"{HOUR_AGO} + interval '1 microsecond'", STALE, first_id=4)
    add_builds(1, "canceling", STALE, NOW, first_id=5)

    result = run_sweep(drop_canceling, clock=clock)

    assert (result.outcome, result.counts) == ("done", {**NOTHING_DROPPED, "dropped": 1})
    assert by_status() == {"failed": [1], "canceling": [2, 3, 4, 5]}


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_dropped_build_has_failed_with_its_reason_at_the_time_of_its_batch(
    either: type[Build], add_builds: AddBuilds, clock: ManualClock, postgres: Database, times: DatabaseTimes, zone: str
) -> None:
    # 出力データ, データベース操作仕様: UPDATE status, failure_reason.
    add_builds(2, "canceling", STALE, STALE)
    set_in_session(postgres, f"TIME ZONE '{zone}'")

    run_sweep(changed(drop_canceling, batch=1), clock=clock, on_batch=times.note)

    builds = list(Build.select().order_by(Build.id))
    assert [(each.status, each.failure_reason, each.lock_version) for each in builds] == [("failed", 3, 4)] * 2
    assert [times.batch_of(each.finished_at) for each in builds] == [0, 1]
    assert [each.updated_at for each in builds] == [each.finished_at for each in builds]
    assert builds[0].created_at == clock.now() - timedelta(hours=1, microseconds=1)


def test_no_other_status_or_type_is_touched(either: type[Build], add_builds: AddBuilds, clock: ManualClock) -> None:
    # 入力データソース, 処理シーケンス 3
    others = ["created", "pending", "running", "success", "failed", "canceled", "skipped", "manual", "scheduled"]
    others += ["preparing", "waiting_for_resource", "waiting_for_callback"]
    for number, status in enumerate(others, 1):
        add_builds(1, status, STALE, STALE, first_id=number)
    add_builds(1, "canceling", STALE, STALE, first_id=50, type="'Ci::Bridge'")

    result = run_sweep(drop_canceling, clock=clock)

    assert result.counts == NOTHING_DROPPED
    assert Build.select().where(Build.lock_version == 3).count() == len(others) + 1


def test_builds_without_a_project_are_dropped_in_their_turn(
    either: type[Build], add_builds: AddBuilds, clock: ManualClock
) -> None:
    add_builds(150, "canceling", STALE, STALE)
    add_builds(250, "canceling", STALE, STALE, first_id=1000, project_id="NULL")
    add_builds(150, "canceling", f"{STALE} + interval '0'", STALE, first_id=2000, lock_version="NULL")

    result = run_sweep(drop_canceling, clock=clock)

    assert (result.outcome, result.counts) == ("done", {**NOTHING_DROPPED, "dropped": 550})
    assert Build.get(Build.id == 2000).lock_version == 1


def test_batches_have_100_builds_in_order_of_age_and_project(
    builds: type[Build], add_builds: AddBuilds, postgres: Database
) -> None:
    # テーブル別操作詳細: バッチサイズ100件, created_at ASC, project_id ASC.
    add_builds(100, "canceling", STALE, STALE, project_id="500 - n")
    add_builds(100, "canceling", f"{STALE} - interval '1 day'", STALE, first_id=101)
    batches: list[list[int]] = []

    def note(sender: str, *, rows: list[dict[str, Any]], **about: Any) -> None:
        batches.append([row["build_id"] for row in rows])

    with events.build_dropped.connected_to(note):
        run_sweep(drop_canceling, clock=ManualClock())

    assert [len(batch) for batch in batches] == [100, 100]
    assert set(batches[0]) == set(range(101, 201)), "the older ones"
    assert batches[1] == list(range(100, 0, -1)), "by project"


def test_log_lines_match_the_document(
    builds: type[Build], add_builds: AddBuilds, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    # ログ出力: 開始ログ, 進捗ログ.
    caplog.set_level(logging.INFO)
    add_builds(2, "canceling", STALE, STALE)

    run_sweep(drop_canceling, clock=clock)

    (start,) = lines(caplog, "Cleaning canceling, timed-out builds")
    dropped = lines(caplog, "Dropping outdated build")
    fields = ("levelname", "build_id", "runner_id", "status", "failure_reason")
    assert start["levelname"] == "INFO"
    assert [tuple(line[name] for name in fields) for line in dropped] == [
        ("INFO", 1, 1, "canceling", "stuck_or_timeout_failure"),
        ("INFO", 2, 2, "canceling", "stuck_or_timeout_failure"),
    ]


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


#: The manual clock's time in a column that has a zone.
ZONED_HOUR_AGO = "timestamptz '2026-01-01 00:00:00+00' - interval '1 hour'"
ZONED_STALE = f"{ZONED_HOUR_AGO} - interval '1 microsecond'"


def test_running_builds_not_updated_for_more_than_an_hour_are_dropped(
    either: type[Build], add_builds: AddBuilds, clock: ManualClock
) -> None:
    add_builds(1, "running", NOW, STALE, first_id=1)
    add_builds(1, "running", STALE, HOUR_AGO, first_id=2)
    add_builds(1, "running", STALE, f"{HOUR_AGO} + interval '1 microsecond'", first_id=3)
    add_builds(1, "canceling", STALE, STALE, first_id=4)

    result = run_sweep(drop_running, clock=clock)

    assert result.counts == {"dropped": 1, "doomed": 0, "failed": 0, "out_of_time": False}
    assert by_status() == {"failed": [1], "running": [2, 3], "canceling": [4]}
    assert Build.get(Build.id == 1).failure_reason == 3


def test_builds_scheduled_for_more_than_an_hour_ago_are_dropped_as_stale(
    either: type[Build], add_builds: AddBuilds, clock: ManualClock
) -> None:
    add_builds(1, "scheduled", STALE, NOW, first_id=1, scheduled_at=ZONED_STALE)
    add_builds(1, "scheduled", STALE, STALE, first_id=2, scheduled_at=ZONED_HOUR_AGO)
    add_builds(1, "scheduled", STALE, STALE, first_id=3, scheduled_at=f"{ZONED_HOUR_AGO} + interval '1 microsecond'")
    add_builds(1, "scheduled", STALE, STALE, first_id=4, scheduled_at="NULL")

    result = run_sweep(drop_scheduled, clock=clock)

    assert result.counts == {"dropped": 1, "doomed": 0, "failed": 0, "out_of_time": False}
    assert by_status() == {"failed": [1], "scheduled": [2, 3, 4]}
    assert Build.get(Build.id == 1).failure_reason == 7


@pytest.mark.parametrize(
    ("sweep", "status", "reason", "start"),
    [
        (drop_running, "running", "stuck_or_timeout_failure", "Cleaning running, timed-out builds"),
        (drop_scheduled, "scheduled", "stale_schedule", "Cleaning scheduled, timed-out builds"),
    ],
)
def test_siblings_log_their_start_messages(
    builds: type[Build],
    add_builds: AddBuilds,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
    sweep: Sweep,
    status: str,
    reason: str,
    start: str,
) -> None:
    caplog.set_level(logging.INFO)
    add_builds(1, status, STALE, STALE, scheduled_at=ZONED_STALE)

    run_sweep(sweep, clock=clock)

    assert len(lines(caplog, start)) == 1
    (line,) = lines(caplog, "Dropping outdated build")
    assert (line["build_id"], line["status"], line["failure_reason"]) == (1, status, reason)
