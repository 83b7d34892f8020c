"""The breaker's default: a run that finds far more rows than usual continues and raises an alert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from housekeeping import Delete, Guard, Sweep
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.declarations import changed
from tests.faults import at_step, lose_database
from tests.integration.conftest import AddStatuses
from tests.integration.own_stages import with_stages
from tests.integration.sweeps.conftest import History
from tests.integration.sweeps.engine.sizing import DUE, SMALL
from tests.internals.core import DeclarationError
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.insight import worker_status
from tests.internals.ledger import Counts
from tests.internals.sweeps import Backlog, TableStage
from tests.internals.workers import status_sweep as statuses_sweep

FLOOD = 10_001


def alerts(sweep: Sweep, clock: ManualClock, name: str = "breaker") -> list[str]:
    """Return the alerts of `housekeeping status` and the dashboard."""
    return [alarm.text for alarm in worker_status(sweep, clock.now(), UTC).alarms if alarm.name == name]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The alerts in the log at a run's end."""
    return [record.__dict__["alarm"] for record in caplog.records if record.getMessage() == "Alert"]


def test_flood_of_statuses_is_deleted_with_an_alert(
    add_statuses: AddStatuses, history: History, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    history(50, 3)
    add_statuses(FLOOD, DUE)

    result = run_sweep(statuses_sweep, clock=clock)

    assert (result.outcome, result.reason, result.exit_code) == ("done", None, 0)
    assert result.counts["deleted_rows"] == FLOOD and UserStatus.select().count() == 0
    assert "breaker" in logged(caplog)
    assert alerts(statuses_sweep, clock) == [
        "more than 10,000 rows are stale; the last 50 runs processed 3 at most, the breaker allows 10,000; the run "
        "continues; if these rows should stay: housekeeping pause user_status_cleanup.batch"
    ]


def test_alert_stays_while_the_flood_lasts_and_ends_after_a_normal_run(
    add_statuses: AddStatuses, history: History, low_floor: None, clock: ManualClock
) -> None:
    history(10, 0)
    add_statuses(60, DUE)
    hasty = changed(SMALL, runtime=timedelta(seconds=1))

    def late(counts: Counts) -> None:
        clock.advance(timedelta(seconds=2))

    rang = []
    for _ in range(4):
        run_sweep(hasty, clock=clock, on_batch=late)
        rang.append(len(alerts(SMALL, clock)))

    assert rang == [1, 1, 1, 0]  # with 60, 40 and 20 rows, then none: two batches a run


def test_skipped_run_does_not_hide_the_alert(
    add_statuses: AddStatuses, history: History, low_floor: None, clock: ManualClock
) -> None:
    history(10, 0)
    add_statuses(11, DUE)
    run_sweep(SMALL, clock=clock)

    history(1, 0, "skipped", "lease_held")

    assert len(alerts(SMALL, clock)) == 1


def test_run_at_work_shows_the_alert_after_its_first_batch(
    add_statuses: AddStatuses, history: History, low_floor: None, clock: ManualClock
) -> None:
    history(10, 0)
    add_statuses(30, DUE)
    seen: list[int] = []

    run_sweep(SMALL, clock=clock, on_batch=lambda counts: seen.append(len(alerts(SMALL, clock))))

    assert seen[0] == 1


def test_run_that_fails_after_the_alert_keeps_it(
    add_statuses: AddStatuses, history: History, low_floor: None, clock: ManualClock
) -> None:
    history(10, 0)
    add_statuses(30, DUE)

    def fail(counts: Counts) -> None:
        raise OSError("the disk is full")

    assert run_sweep(SMALL, clock=clock, on_batch=fail).outcome == "failed"
    assert len(alerts(SMALL, clock)) == 1


def test_flood_in_portions_does_not_become_usual(
    add_statuses: AddStatuses, history: History, low_floor: None, clock: ManualClock
) -> None:
    history(10, 0)
    add_statuses(11, DUE)
    run_sweep(SMALL, clock=clock)
    flood = {"breaker": {"action": "alert", "stale": 10, "exact": False, "allowed": 10, "usual": 0, "runs": 10}}
    history(60, 1000, "partial", "out_of_time", **flood)
    add_statuses(11, DUE)

    run_sweep(SMALL, clock=clock)

    assert "processed 0 at most, the breaker allows 10;" in alerts(SMALL, clock)[0]


@pytest.mark.parametrize(("runs", "alert"), [(9, True), (10, False)])
def test_load_that_ten_runs_finished_is_usual(
    add_statuses: AddStatuses, history: History, low_floor: None, clock: ManualClock, runs: int, alert: bool
) -> None:
    flood = {"breaker": {"action": "alert", "stale": 10, "exact": False, "allowed": 10, "usual": 0, "runs": 10}}
    history(10, 0)
    history(runs, 11, **flood)
    add_statuses(11, DUE)

    run_sweep(SMALL, clock=clock)

    assert bool(alerts(SMALL, clock)) == alert


@dataclass(frozen=True, kw_only=True)
class _SlowToCount(TableStage):
    first_count: Iterator[str]

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        for statement in self.first_count:
            database.execute_sql(statement)
        return TableStage.backlog(self, now, limit, argument)


@pytest.mark.parametrize(
    ("action", "outcome", "reason"),
    [("alert", "done", None), ("limit", "partial", "breaker"), ("stop", "failed", "breaker")],
)
def test_count_that_times_out_alerts_and_only_stop_fails(
    add_statuses: AddStatuses,
    history: History,
    low_floor: None,
    clock: ManualClock,
    action: Any,
    outcome: str,
    reason: str | None,
) -> None:
    history(10, 0)
    add_statuses(25, DUE)
    slow = with_stages(SMALL, _SlowToCount, first_count=iter(["SELECT pg_sleep(30)"]))
    breaker = Guard(action=action)

    result = run_sweep(changed(slow, guard=breaker, runtime=timedelta(milliseconds=200)), clock=clock)

    assert (result.outcome, result.reason) == (outcome, reason)
    assert result.counts["deleted_rows"] == {"alert": 25, "limit": 10, "stop": 0}[action]
    assert alerts(SMALL, clock)[0].startswith("the stale rows could not be counted;")


def test_timeout_of_the_count_ends_with_it(add_statuses: AddStatuses, history: History) -> None:
    history(10, 0)
    add_statuses(5, DUE)
    before = database.execute_sql("SHOW statement_timeout").fetchone()

    run_sweep(SMALL)

    assert database.execute_sql("SHOW statement_timeout").fetchone() == before != ("5s",)


def test_database_that_goes_away_in_the_count_fails_the_run(add_statuses: AddStatuses, history: History) -> None:
    history(10, 0)

    with at_step(TableStage, "probes", "before", lose_database):
        assert run_sweep(SMALL).outcome == "failed"


def test_unknown_breaker_action_is_rejected() -> None:
    with pytest.raises(DeclarationError, match="action is 'halt'; write 'alert', 'limit' or 'stop'"):
        Guard(action="halt")  # type: ignore[arg-type]


def test_count_name_reserved_by_the_engine_is_rejected() -> None:
    with pytest.raises(DeclarationError, match="counts 'throttled'; give this count another name"):
        changed(SMALL, action=Delete(rows_counted_as="throttled"))
