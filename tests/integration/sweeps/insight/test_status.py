from __future__ import annotations

import dataclasses
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from housekeeping.database.connection import Database
from housekeeping.sweeps.engine.failures.rejection_store import Rejected, record
from housekeeping.sweeps.insight.backlog import Rates
from housekeeping.sweeps.insight.status import worker_status
from housekeeping.sweeps.ledger import run_start
from housekeeping.sweeps.ledger.models import NOW, Run, Switch
from housekeeping.sweeps.ledger.overrides import Override, overrides, switch
from housekeeping.sweeps.ledger.runs import Counts
from housekeeping.sweeps.limits.declared import AlertThresholds
from housekeeping.web import alert_help
from housekeeping.workers.user_status_cleanup.models import UserStatus
from housekeeping.workers.user_status_cleanup.worker import sweep
from tests.integration.conftest import AddStatuses

_ALARMS_PAGE = Path(__file__).parents[4] / "docs/howto/alerts.md"
_UTC = ZoneInfo("UTC")
_NOW = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
_AT = "'2026-01-01 00:00:30+00'::timestamptz"


def _ended(
    outcome: str,
    *,
    reason: str | None = None,
    error: str | None = None,
    counts: Counts | None = None,
    seconds_ago: float = 20,
    took_s: float = 70,
    backlog: int | None = None,
) -> None:
    ended = _NOW - timedelta(seconds=seconds_ago)
    Run.insert(
        worker=sweep.name,
        trigger="cli",
        started_at=ended - timedelta(seconds=took_s),
        heartbeat_at=_NOW,
        finished_at=ended,
        outcome=outcome,
        reason=reason,
        error=error,
        counts=counts or {},
        backlog=backlog,
        backlog_exact=True,
    ).execute()


def _names(alerts: AlertThresholds | None = None) -> list[str]:
    watched = dataclasses.replace(sweep, alerts=alerts or AlertThresholds())
    return [alarm.name for alarm in worker_status(watched, _NOW, _UTC).alarms]


def test_status_of_a_worker_that_never_ran(statuses: type[UserStatus]) -> None:
    seen = worker_status(sweep, _NOW, ZoneInfo("UTC"))

    assert (seen.state, seen.last_run, seen.oldest, seen.alarms) == ("on", None, None, [])
    assert seen.next_tick == datetime(2026, 1, 1, 0, 1, tzinfo=UTC)


def test_next_tick_follows_the_time_zone_and_is_in_utc(statuses: type[UserStatus]) -> None:
    nightly = dataclasses.replace(sweep, schedule="0 3 * * *")

    seen = worker_status(nightly, _NOW, ZoneInfo("Europe/Berlin"))

    assert seen.next_tick == datetime(2026, 1, 1, 2, tzinfo=UTC)


def test_backlog_and_oldest_use_the_runs_predicate(add_statuses: AddStatuses) -> None:
    add_statuses(3, f"{_AT} - interval '1 hour' * (n - 1)")
    add_statuses(2, f"{_AT} + interval '1 microsecond' * n", first_id=100)

    seen = worker_status(sweep, _NOW, ZoneInfo("UTC"))

    assert (str(seen.waiting), seen.oldest) == ("3", _NOW - timedelta(hours=2))


def test_counts_of_the_last_run_keep_the_workers_order(statuses: type[UserStatus]) -> None:
    _ended("done", counts={"a_former_count": 1, "out_of_time": False, "batches": 2, "deleted_rows": 3, "failed": 4})

    last = worker_status(sweep, _NOW, ZoneInfo("UTC")).as_json()["last_run"]

    assert list(last["counts"])[:3] == ["deleted_rows", "batches", "out_of_time"]
    assert (last["duration_s"], last["outcome"], len(last["counts"])) == (70, "done", 5)


def test_open_run_has_no_outcome(statuses: type[UserStatus]) -> None:
    run_start.begin(sweep.name, message_id=None, tick=None, trigger="cli", lease=None)

    last = worker_status(sweep, _NOW, ZoneInfo("UTC")).last_run

    assert last is not None
    assert (last["outcome"], last["duration_s"]) == (None, None)


@pytest.mark.parametrize(("rows", "rings"), [(4, []), (5, []), (6, ["more than 5 rows wait"])])
def test_backlog_above_the_threshold_raises_an_alert(add_statuses: AddStatuses, rows: int, rings: list[str]) -> None:
    add_statuses(rows, _AT)

    seen = worker_status(dataclasses.replace(sweep, alerts=AlertThresholds(backlog=5)), _NOW, ZoneInfo("UTC"))

    assert [str(alarm) for alarm in seen.alarms] == rings


def test_long_or_failed_last_run_raises_an_alert(statuses: type[UserStatus]) -> None:
    _ended("failed", reason="database: gone", error="gone", counts={"failed": 2})

    assert [str(alarm) for alarm in worker_status(sweep, _NOW, ZoneInfo("UTC")).alarms] == [
        "the last run took 70 s, over 60 s",
        "2 rows could not be processed",
        "the last run ended as failed: gone",
    ]


def test_missing_table_is_an_alert_of_its_worker(postgres: Database) -> None:
    seen = worker_status(sweep, _NOW, ZoneInfo("UTC"))

    assert (seen.waiting, seen.oldest, seen.as_json()["backlog"]) == (None, None, None)
    assert [str(alarm) for alarm in seen.alarms] == [
        'the backlog cannot be counted: relation "user_statuses" does not exist'
    ]


def test_missing_table_is_no_alert_of_a_disabled_worker(postgres: Database) -> None:
    assert worker_status(dataclasses.replace(sweep, enabled=False), _NOW, _UTC).alarms == []


def test_disabled_worker_has_no_next_tick(statuses: type[UserStatus]) -> None:
    seen = worker_status(dataclasses.replace(sweep, enabled=False), _NOW, ZoneInfo("UTC"))

    assert (seen.state, seen.next_tick) == ("disabled", None)


@pytest.mark.parametrize(
    ("until", "paused"), [("NULL", True), ("now() + interval '1 hour'", True), ("now() - interval '1 second'", False)]
)
def test_pause_lasts_until_its_end(postgres: Database, statuses: type[UserStatus], until: str, paused: bool) -> None:
    table = f'"{Switch._meta.schema}".switches'
    postgres.execute_sql(f"INSERT INTO {table} VALUES ('{sweep.name}', 'paused', 'too busy', {until})")

    assert (sweep.name in overrides()) == paused
    assert (worker_status(sweep, _NOW, ZoneInfo("UTC")).state == "paused") == paused


@pytest.mark.parametrize(("seconds_ago", "rings"), [(180, []), (181, ["overdue"])])
def test_worker_silent_for_over_three_periods_raises_an_alert(
    statuses: type[UserStatus], seconds_ago: float, rings: list[str]
) -> None:
    _ended("done", seconds_ago=seconds_ago - 10, took_s=10)

    assert _names() == rings


def test_missed_ticks_do_not_clear_the_overdue_alert(statuses: type[UserStatus]) -> None:
    _ended("done", seconds_ago=400)
    _ended("missed", seconds_ago=10, took_s=0)

    assert _names() == ["overdue"]


@pytest.mark.parametrize(
    ("started_s_ago", "heartbeat", "rings"),
    [
        (400, NOW, []),
        (170, NOW - timedelta(minutes=5), []),
        (400, NOW - timedelta(minutes=5), ["overdue"]),
    ],
    ids=["running", "lost", "lost_long_ago"],
)
def test_worker_with_an_open_run_is_overdue_only_if_that_was_lost_long_ago(
    statuses: type[UserStatus], started_s_ago: float, heartbeat: Any, rings: list[str]
) -> None:
    _ended("done", seconds_ago=900)
    started_at = _NOW - timedelta(seconds=started_s_ago)
    Run.insert(worker=sweep.name, trigger="schedule", started_at=started_at, heartbeat_at=heartbeat).execute()

    assert [name for name in _names() if name == "overdue"] == rings


@pytest.mark.parametrize(
    ("limit", "state", "rings"),
    [(3, "narrow", ["overdue"]), (3, "paused", []), (None, "narrow", []), (9, "narrow", [])],
)
def test_paused_or_disabled_worker_is_not_overdue(
    statuses: type[UserStatus], limit: int | None, state: str, rings: list[str]
) -> None:
    _ended("done", seconds_ago=400)
    switch(Override(sweep.name, "paused" if state == "paused" else "narrow", batch_size=5))

    assert _names(AlertThresholds(overdue=limit)) == rings


@pytest.mark.parametrize(
    ("outcome", "rings"),
    [
        ("failed", ["last_run"]),
        ("lost", ["last_run"]),
        ("lost_lease", ["last_run"]),
        ("done", []),
        ("partial", []),
        ("skipped", []),
    ],
)
def test_only_the_last_failed_run_raises_an_alert(statuses: type[UserStatus], outcome: str, rings: list[str]) -> None:
    _ended("failed", seconds_ago=120)
    _ended(outcome, reason="why")

    assert _names() == rings


@pytest.mark.parametrize(
    ("outcomes", "rings"),
    [
        (["failed", "lost"], []),
        (["failed", "lost", "lost_lease"], ["failed_runs"]),
        (["failed", "done", "failed", "failed"], []),
        # A skipped run has neither failed nor succeeded.
        (["failed", "skipped", "failed", "missed", "lost", "skipped"], ["failed_runs"]),
    ],
)
def test_three_failed_runs_in_a_row_raise_an_alert(
    statuses: type[UserStatus], outcomes: list[str], rings: list[str]
) -> None:
    for outcome in outcomes:
        _ended(outcome)

    assert [name for name in _names(AlertThresholds(failed_runs=3)) if name != "last_run"] == rings


def test_last_success_is_the_last_run_that_did_its_work(statuses: type[UserStatus]) -> None:
    _ended("done", seconds_ago=900)
    _ended("partial", reason="limit", seconds_ago=800)
    _ended("partial", reason="shutdown", seconds_ago=700)
    _ended("failed", reason="gone", seconds_ago=600)
    _ended("skipped", reason="lease_held", seconds_ago=500)

    seen = worker_status(sweep, _NOW, _UTC)

    assert seen.last_success == _NOW - timedelta(seconds=800)
    assert seen.as_json()["last_success"] == "2025-12-31T23:47:10+00:00"


def test_worker_that_never_did_its_work_has_no_last_success(statuses: type[UserStatus]) -> None:
    _ended("failed", reason="gone")

    assert worker_status(sweep, _NOW, _UTC).as_json()["last_success"] is None


def test_hourly_rates_come_from_the_last_runs(statuses: type[UserStatus]) -> None:
    _ended("done", counts={"deleted_rows": 9}, seconds_ago=3620, backlog=10)
    _ended("done", counts={"deleted_rows": 60}, seconds_ago=20, backlog=40)

    seen = worker_status(sweep, _NOW, _UTC)

    assert seen.rates == Rates(drained=60, arrived=90)
    assert (seen.as_json()["drained_per_hour"], seen.as_json()["arrived_per_hour"]) == (60, 90)


def test_every_alert_is_explained_on_the_page_and_in_the_docs(statuses: type[UserStatus]) -> None:
    _ended(
        "failed", error="gone", counts={"failed": 1, "deleted_rows": 9, "clock_skew_s": 6}, seconds_ago=400, took_s=999
    )
    statuses.drop_table()
    limits = dataclasses.replace(sweep.alerts, most={"deleted_rows": 5}, failed_runs=1)

    rings = worker_status(dataclasses.replace(sweep, alerts=limits), _NOW, _UTC).alarms

    documented = re.findall(r"^\| `(\w+…?)`", _ALARMS_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    topics = {alert_help.topic(alarm.name) for alarm in rings}
    assert topics == {"longest_run", "failed_rows", "most_…", "failed_runs", "last_run", "overdue", "unseen", "clock"}
    assert topics | {"backlog", "breaker", "throttled"} <= set(documented) == set(alert_help.ALERTS)


def test_rejected_records_are_shown_by_argument_and_cause(statuses: type[UserStatus]) -> None:
    for rows in range(1, 13):
        found = {"the cause": Rejected(rows, {"record": {"id": rows}, "error": "no"})}
        record(sweep.name, str(rows), found, complete=True, delayed=True, position=(rows,))
    record("another.worker", "", {"x": Rejected(99, {})}, complete=True, delayed=True, position=None)

    shown = worker_status(sweep, datetime.now(UTC), _UTC).as_json()

    assert [each["rows"] for each in shown["rejected"]] == list(range(12, 2, -1))
    assert shown["rejected_more"] == 2
    first = shown["rejected"][0]
    assert (first["argument"], first["cause"], first["sample"]["record"]) == ("12", "the cause", {"id": 12})
    assert first["since"] <= first["last_at"] < first["not_before"]


def test_worker_without_rejected_records_shows_none(statuses: type[UserStatus]) -> None:
    shown = worker_status(sweep, _NOW, _UTC).as_json()

    assert (shown["rejected"], shown["rejected_more"]) == ([], 0)
