from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from housekeeping.testing.stubs import ManualClock
from tests.integration.conftest import AddStatuses
from tests.internals.cli import print_plan
from tests.internals.database import Database
from tests.internals.insight import Rates, as_json, last_ended, pace, plan, rates
from tests.internals.ledger import Run
from tests.internals.workers import status_sweep as sweep

_START = datetime(2026, 1, 1, tzinfo=UTC)


def _ran(
    hour: float,
    processed: int,
    *,
    left: int | None = 0,
    exact: bool = True,
    outcome: str = "done",
    seconds: float = 10,
    worker: str = sweep.name,
) -> None:
    """A run that ended this many hours after the start."""
    ended = _START + timedelta(hours=hour)
    Run.insert(
        worker=worker,
        trigger="schedule",
        started_at=ended - timedelta(seconds=seconds),
        heartbeat_at=ended,
        finished_at=ended,
        outcome=outcome,
        counts={"deleted_rows": processed, "batches": 1},
        backlog=left,
        backlog_exact=exact,
    ).execute()


def test_arrival_is_processed_rows_plus_backlog_growth(postgres: Database) -> None:
    _ran(0, 1000, left=50)
    _ran(1, 300, left=40)
    _ran(2, 500, left=250)

    # Of the first run only what it left counts: its own work was done before.
    assert rates(sweep, last_ended(sweep)) == Rates(drained=400, arrived=500)


def test_backlog_counted_up_to_a_limit_leaves_arrival_unknown(postgres: Database) -> None:
    _ran(0, 0, left=10_000, exact=False)
    _ran(1, 300, left=400)

    assert rates(sweep, last_ended(sweep)) == Rates(drained=300, arrived=None)


def test_run_without_a_backlog_count_still_adds_its_rows(postgres: Database) -> None:
    _ran(0, 0)
    _ran(1, 200, left=None)
    _ran(2, 100)

    assert rates(sweep, last_ended(sweep)) == Rates(drained=150, arrived=150)


def test_count_that_is_a_text_is_no_processed_row(postgres: Database) -> None:
    _ran(0, 0)
    _ran(1, 300)
    _ran(2, 0)
    Run.update(counts={"deleted_rows": "many", "batches": 1}).where(
        Run.finished_at == _START + timedelta(hours=2)
    ).execute()

    assert rates(sweep, last_ended(sweep)) == Rates(drained=150, arrived=150)


@pytest.mark.parametrize("hours", [[], [1], [1, 1]])
def test_fewer_than_two_runs_give_no_rate(postgres: Database, hours: list[float]) -> None:
    for hour in hours:
        _ran(hour, 100)

    assert rates(sweep, last_ended(sweep)) is None


def test_only_the_workers_own_last_runs_count_oldest_first(postgres: Database) -> None:
    for hour, outcome in enumerate(("done", "skipped", "failed", "missed", "lost", "partial")):
        _ran(hour, hour, outcome=outcome)
    _ran(9, 9, worker="another")

    assert [run.counts["deleted_rows"] for run in last_ended(sweep)] == [0, 2, 4, 5]


def test_pace_is_measured_over_successful_runs(postgres: Database) -> None:
    _ran(0, 100, seconds=2)
    _ran(1, 300, seconds=6, outcome="partial")
    _ran(2, 9000, seconds=1, outcome="failed")

    assert pace(sweep, last_ended(sweep)) == 50


def test_plan_estimates_the_duration_from_the_workers_runs(
    add_statuses: AddStatuses, clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    _ran(0, 100, seconds=40)
    add_statuses(150, "'2026-01-01 00:00:00+00'::timestamptz - interval '1 second' * n")

    planned = plan(sweep, clock=clock)
    print_plan(planned)

    assert (as_json(planned)["expected_s"], as_json(planned)["rows_per_s"]) == (60, 2.5)
    assert as_json(planned)["stages"][0]["expected_s"] == 60
    assert capsys.readouterr().out.splitlines()[1].split()[1:5] == ["150", "2", "1", "min"]


def test_plan_without_history_has_no_duration(
    add_statuses: AddStatuses, clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    add_statuses(1, "'2026-01-01 00:00:00+00'::timestamptz")

    planned = plan(sweep, clock=clock)
    print_plan(planned)

    assert (as_json(planned)["expected_s"], as_json(planned)["rows_per_s"]) == (None, None)
    assert capsys.readouterr().out.splitlines()[1].split()[1:4] == ["1", "1", "unknown"]


def test_plan_counted_up_to_its_limit_gives_a_minimum_duration(
    add_statuses: AddStatuses, clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    _ran(0, 100, seconds=40)
    add_statuses(151, "'2026-01-01 00:00:00+00'::timestamptz")

    print_plan(plan(sweep, clock=clock, limit=150))

    assert "over 1 min" in capsys.readouterr().out


def test_plan_without_stale_rows_takes_no_time(
    add_statuses: AddStatuses, clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = plan(sweep, clock=clock)
    print_plan(planned)

    assert json.loads(json.dumps(as_json(planned)))["expected_s"] == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:] == ["0", "0", "-", "-", "-"]


@pytest.mark.parametrize(("minutes", "known"), [(9.9, False), (10, True)])
def test_rate_needs_ten_minutes_of_observation(postgres: Database, minutes: float, known: bool) -> None:
    _ran(0, 0)
    _ran(minutes / 60, 40_000)

    assert (rates(sweep, last_ended(sweep)) is not None) == known
