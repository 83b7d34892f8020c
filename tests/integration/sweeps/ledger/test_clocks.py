"""Runs, plans and what people are shown on a machine whose clock is not the database's."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.conftest import AddStatuses, SetAhead
from tests.integration.metrics.conftest import Exported
from tests.integration.metrics.conftest import exported as exported
from tests.integration.sweeps.conftest import History
from tests.integration.sweeps.engine.sizing import SMALL
from tests.internals.core import ClocksDiffer
from tests.internals.database import database_now
from tests.internals.engine import run_sweep
from tests.internals.insight import dry_run, plan, why, worker_status
from tests.internals.ledger import Run, runs
from tests.internals.workers import status_sweep as sweep

TWO_DAYS = timedelta(days=2)
TOMORROW = "now() + interval '1 day'"
DUE_NOW = "now() - interval '1 second' * n"
UTC_ZONE = ZoneInfo("UTC")


@pytest.mark.parametrize("ahead", [TWO_DAYS, -TWO_DAYS])
def test_run_does_not_start_where_the_clocks_are_days_apart(
    add_statuses: AddStatuses, set_ahead: SetAhead, last_run: Callable[[], Run], ahead: timedelta
) -> None:
    add_statuses(3, DUE_NOW)
    set_ahead(ahead)

    result = run_sweep(sweep)

    run = last_run()
    assert (result.outcome, result.reason, result.exit_code, result.run_id) == ("failed", "clock", 1, run.id)
    assert (run.outcome, run.reason, run.finished_at is not None) == ("failed", "clock", True)
    assert run.error == str(result.error)
    assert "clocks differ, nothing was changed: this machine (" in run.error and "check NTP" in run.error
    assert UserStatus.select().count() == 3
    with pytest.raises(ClocksDiffer):
        result.raise_for_failure()


def test_forced_run_changes_only_rows_stale_by_the_databases_clock(
    add_statuses: AddStatuses, set_ahead: SetAhead, last_run: Callable[[], Run]
) -> None:
    add_statuses(3, DUE_NOW)
    add_statuses(2, TOMORROW, first_id=10)
    set_ahead(TWO_DAYS)

    result = run_sweep(sweep, force=True)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 3)
    assert [status.user_id for status in UserStatus.select().order_by(UserStatus.user_id)] == [10, 11]
    assert last_run().backlog == 0


def test_plan_and_dry_run_count_rows_stale_by_the_databases_clock(
    add_statuses: AddStatuses, set_ahead: SetAhead
) -> None:
    add_statuses(3, DUE_NOW)
    add_statuses(2, TOMORROW, first_id=10)
    set_ahead(TWO_DAYS)

    planned = plan(sweep)

    assert (planned.stale.rows, dry_run(sweep).counts["deleted_rows"]) == (3, 3)
    assert planned.clock_skew is not None and planned.clock_skew.refused
    assert abs(planned.as_json()["clock_skew_s"] - TWO_DAYS.total_seconds()) < 1
    assert abs(planned.now - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.parametrize("ahead_s", [6, -6, 57])
def test_difference_over_5_s_is_an_alert_and_the_run_continues(
    add_statuses: AddStatuses,
    set_ahead: SetAhead,
    exported: Exported,
    caplog: pytest.LogCaptureFixture,
    ahead_s: int,
) -> None:
    add_statuses(3, DUE_NOW)
    set_ahead(timedelta(seconds=ahead_s))

    with caplog.at_level(logging.WARNING):
        result = run_sweep(sweep)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 3)
    assert abs(result.counts["clock_skew_s"] - ahead_s) < 1
    assert [each.getMessage() for each in caplog.records] == ["Clocks differ", "Alert"]
    side = "ahead of" if ahead_s > 0 else "behind"
    [alarm] = worker_status(sweep, database_now(), UTC_ZONE).alarms
    assert alarm.name == "clock" and f" s {side} the database's; check NTP" in str(alarm)
    assert round(exported("housekeeping_clock_skew_seconds", worker=sweep.name) or 0) == ahead_s
    assert exported("housekeeping_alarm", worker=sweep.name, alarm="clock") == 1
    assert exported("housekeeping_rows_total", worker=sweep.name, result="clock_skew_s") is None


@pytest.mark.parametrize("ahead_s", [0, 4, -4])
def test_difference_of_a_few_seconds_is_no_alert(
    add_statuses: AddStatuses, set_ahead: SetAhead, exported: Exported, ahead_s: int
) -> None:
    add_statuses(3, DUE_NOW)
    set_ahead(timedelta(seconds=ahead_s))

    result = run_sweep(sweep)

    assert result.counts == {"deleted_rows": 3, "batches": 1, "out_of_time": False}
    assert worker_status(sweep, database_now(), UTC_ZONE).alarms == []
    assert exported("housekeeping_alarm", worker=sweep.name, alarm="clock") == 0


def test_runs_rejected_for_clock_skew_are_no_history_and_keep_the_cursor(
    add_statuses: AddStatuses, history: History, set_ahead: SetAhead
) -> None:
    add_statuses(20, DUE_NOW)
    history(1, 7)
    Run.create(
        worker=SMALL.name,
        trigger="schedule",
        started_at=database_now(),
        heartbeat_at=database_now(),
        finished_at=database_now(),
        outcome="failed",
        reason="database: gone",
        counts={"deleted_rows": 5},
        cursor={"pass": SMALL.name, "after": ["2026-01-01", 1]},
    )
    set_ahead(TWO_DAYS)
    refused = [run_sweep(SMALL).reason for _ in range(3)]
    set_ahead(timedelta())

    attempt = runs.begin(SMALL.name, message_id=None, tick=None, trigger="cli", lease=None)

    assert refused == ["clock"] * 3 and attempt is not None
    assert [past.counts["deleted_rows"] for past in attempt.history] == [5, 7]
    assert attempt.cursor == {"pass": SMALL.name, "after": ["2026-01-01", 1]}


def test_reason_of_a_tick_rejected_for_clock_skew_is_explained(add_statuses: AddStatuses, set_ahead: SetAhead) -> None:
    set_ahead(TWO_DAYS)
    run_sweep(sweep)

    answer = why(dataclasses.replace(sweep, schedule=None), None, database_now(), UTC_ZONE)

    assert answer.outcome == "failed" and "clocks differ" in answer.meaning
