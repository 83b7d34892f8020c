"""The workers on tables without the columns that only label log lines, error reports and events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Sweep
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from tests.integration.workers.ci_stuck_builds.tables import NOW, AddBuilds, Refuse, lines
from tests.internals.engine import run_sweep
from tests.internals.insight import backlog, oldest, plan
from tests.internals.workers import BUILD_SWEEPS as SWEEPS
from tests.internals.workers import drop_canceling

OLD = f"{NOW} - interval '2 days'"
STUCK_IN = {
    "ci.stuck_builds.drop_pending": "pending",
    "ci.stuck_builds.drop_running": "running",
    "ci.stuck_builds.drop_scheduled": "scheduled",
    "ci.stuck_builds.drop_canceling": "canceling",
}
LABELS = ("runner_id", "name", "stage", "commit_id")

Drop = Callable[..., None]


@pytest.fixture
def drop_columns(admin: Connection) -> Drop:
    def drop(*columns: str) -> None:
        with admin.cursor() as cursor:
            for column in columns:
                cursor.execute(f"ALTER TABLE {Build._meta.table_name} DROP COLUMN {column}")

    return drop


@pytest.mark.slow
@pytest.mark.parametrize("columns", [("stage",), LABELS])
@pytest.mark.parametrize("sweep", [each for each in SWEEPS if each.name in STUCK_IN], ids=lambda sweep: sweep.name)
def test_table_without_labels_is_planned_and_cleaned(
    either: type[Build], add_builds: AddBuilds, drop_columns: Drop, clock: ManualClock, sweep: Sweep, columns: Any
) -> None:
    late = "timestamptz '2025-12-01 00:00:00+00'"
    add_builds(150, STUCK_IN[sweep.name], OLD, OLD, scheduled_at=late)
    drop_columns(*columns)

    planned = plan(sweep, clock=clock)
    waiting, first = backlog(sweep, clock.now(), 1000), oldest(sweep, clock.now())
    result = run_sweep(sweep, clock=clock)

    assert (planned.stale.rows, waiting.rows, first is not None) == (150, 150, True)
    assert (result.counts["dropped"], result.counts["doomed"], result.counts["failed"]) == (150, 0, 0)


def test_labels_that_are_missing_are_left_out_of_lines_events_and_reports(
    builds: type[Build],
    add_builds: AddBuilds,
    drop_columns: Drop,
    refuse: Refuse,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
    heard: Callable[[], dict[str, list[dict[str, Any]]]],
    reported: list[dict[str, Any]],
) -> None:
    caplog.set_level("INFO")
    add_builds(2, "canceling", OLD, OLD)
    refuse("OLD.id = 2 AND NEW.failure_reason IS DISTINCT FROM 12")
    drop_columns("runner_id", "stage", "commit_id")

    result = run_sweep(drop_canceling, clock=clock)

    assert (result.outcome, result.counts["dropped"], result.counts["doomed"]) == ("done", 1, 1)
    dropped = lines(caplog, "Dropping outdated build")
    assert [(line["build_id"], "runner_id" in line) for line in dropped] == [(1, False), (2, False)]
    assert heard()["build_dropped"] == [{"build_id": 1, "project_id": 1, "failure_reason": 3}]
    [about] = reported
    assert (about["build_id"], about["build_name"], about["project_id"]) == (2, "rspec 2", 2)
    assert {"build_stage", "pipeline_id"}.isdisjoint(about)


def test_column_that_is_dropped_under_a_process_costs_it_one_attempt(
    builds: type[Build], add_builds: AddBuilds, drop_columns: Drop, clock: ManualClock, admin: Connection
) -> None:
    add_builds(1, "canceling", OLD, OLD)
    before = run_sweep(drop_canceling, clock=clock)
    drop_columns("stage")
    with admin.cursor() as cursor:
        cursor.execute("UPDATE ci_builds SET status = 'canceling', updated_at = created_at")

    failed = run_sweep(drop_canceling, clock=clock)
    retried = run_sweep(drop_canceling, clock=clock)

    assert (before.counts["dropped"], failed.outcome) == (1, "failed")
    assert (retried.outcome, retried.counts["dropped"]) == ("done", 1)


def test_single_build_of_a_table_without_labels_can_be_dropped(
    builds: type[Build], add_builds: AddBuilds, drop_columns: Drop
) -> None:
    add_builds(1, "running", OLD, OLD)
    drop_columns(*LABELS)

    build = Build.get_by_id(1)
    build.drop()

    assert (Build.get_by_id(1).status, build.stage) == ("failed", None)


def test_missing_required_column_fails_the_run_with_its_name(
    builds: type[Build], drop_columns: Drop, clock: ManualClock
) -> None:
    drop_columns("lock_version")

    result = run_sweep(drop_canceling, clock=clock)

    assert result.outcome == "failed"
    assert "lock_version" in str(result.reason)
