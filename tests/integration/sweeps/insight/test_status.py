from __future__ import annotations

import dataclasses
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from housekeeping import Alerts
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.internals.database import Database
from tests.internals.engine import Rejected, record
from tests.internals.insight import Alert, Rates, as_json, worker_status
from tests.internals.ledger import (
    NOW,
    BusyThread,
    Counts,
    Heartbeat,
    Override,
    Process,
    Processes,
    Run,
    Switch,
    overrides,
    runs,
    switch,
)
from tests.internals.web import alert_help
from tests.internals.workers import status_sweep as sweep

_ALARMS_PAGE = Path(__file__).parents[4] / "docs/howto/alerts.md"
_UTC = ZoneInfo("UTC")
_NOW = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
_MINUTE = Alerts(longest_run=timedelta(minutes=1))
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


def _names(alerts: Alerts | None = None) -> list[str]:
    watched = dataclasses.replace(sweep, alerts=alerts or Alerts())
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

    last = as_json(worker_status(sweep, _NOW, ZoneInfo("UTC")))["last_run"]

    assert list(last["counts"])[:3] == ["deleted_rows", "batches", "out_of_time"]
    assert (last["duration_s"], last["outcome"], len(last["counts"])) == (70, "done", 5)


def test_open_run_has_no_outcome(statuses: type[UserStatus]) -> None:
    runs.begin(sweep.name, message_id=None, tick=None, trigger="cli", lease=None)

    last = worker_status(sweep, _NOW, ZoneInfo("UTC")).last_run

    assert last is not None
    assert (last.outcome, last.duration_s) == (None, None)


@pytest.mark.parametrize(("outcome", "reason"), [("skipped", "deduplicated"), ("missed", "no_scheduler")])
def test_skipped_and_missed_ticks_are_not_the_last_run(statuses: type[UserStatus], outcome: str, reason: str) -> None:
    _ended("done", counts={"deleted_rows": 3})
    _ended(outcome, reason=reason)

    last = worker_status(sweep, _NOW, ZoneInfo("UTC")).last_run

    assert last is not None and (last.outcome, last.counts) == ("done", {"deleted_rows": 3})


def test_alert_of_an_open_run_names_the_run(statuses: type[UserStatus]) -> None:
    run = Run.create(worker=sweep.name, trigger="cli", started_at=_NOW - timedelta(seconds=70))

    [alert] = [each for each in worker_status(sweep, _NOW, _UTC).alarms if each.name == "longest_run"]

    assert str(alert) == f"run {run.id} has taken 70 s, over 60 s"


def test_long_or_failed_last_run_raises_an_alert(statuses: type[UserStatus]) -> None:
    _ended("failed", reason="database: gone", error="gone", counts={"failed": 2})

    assert [str(alarm) for alarm in worker_status(sweep, _NOW, ZoneInfo("UTC")).alarms] == [
        "the last run took 70 s, over 60 s",
        "2 rows could not be processed",
        "the last run ended as failed: gone",
    ]


def test_missing_table_is_an_alert_of_its_worker(postgres: Database) -> None:
    seen = worker_status(sweep, _NOW, ZoneInfo("UTC"))

    assert (seen.waiting, seen.oldest, as_json(seen)["backlog"]) == (None, None, None)
    assert [str(alarm) for alarm in seen.alarms] == [
        'the backlog cannot be counted: relation "user_statuses" does not exist',
        'the age of the oldest stale row cannot be read: relation "user_statuses" does not exist',
    ]


def test_missing_table_is_no_alert_of_a_disabled_worker(postgres: Database) -> None:
    assert worker_status(changed(sweep, enabled=False), _NOW, _UTC).alarms == []


def test_disabled_worker_has_no_next_tick(statuses: type[UserStatus]) -> None:
    seen = worker_status(changed(sweep, enabled=False), _NOW, ZoneInfo("UTC"))

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


@pytest.mark.parametrize(
    ("outcome", "reason", "rings"),
    [
        ("missed", "no_scheduler", ["overdue"]),
        ("skipped", "deduplicated", ["overdue"]),
        ("skipped", "lease_held", ["overdue"]),
        ("skipped", "already_done", ["overdue"]),
        # An operator wanted these.
        ("skipped", "paused", []),
    ],
)
@pytest.mark.parametrize("has_run", [True, False])
def test_ticks_that_began_no_run_do_not_clear_the_overdue_alert(
    statuses: type[UserStatus], outcome: str, reason: str, rings: list[str], has_run: bool
) -> None:
    _ended("done" if has_run else outcome, reason=None if has_run else reason, seconds_ago=400)
    _ended(outcome, reason=reason, seconds_ago=10, took_s=0)

    assert _names() == rings


def _open(*, seconds_ago: float = 5, heartbeat: Any = NOW, counts: Counts | None = None) -> int:
    run_id: int = Run.insert(
        worker=sweep.name,
        trigger="schedule",
        started_at=_NOW - timedelta(seconds=seconds_ago),
        heartbeat_at=heartbeat,
        counts=counts or {},
        host="worker-1",
        pid=4711,
    ).execute()
    return run_id


def test_run_that_has_just_begun_keeps_the_alerts_of_the_last_ended_one(statuses: type[UserStatus]) -> None:
    exceeded = {"breaker": {"stale": 9, "usual": 1, "allowed": 2, "exact": True, "runs": 1, "action": "alert"}}
    _ended("failed", error="gone", counts={"failed": 2, **exceeded}, took_s=70)
    _open(counts={"deleted_rows": 0})

    assert _names(_MINUTE) == ["longest_run", "failed_rows", "last_run", "breaker"]


@pytest.mark.parametrize("newer", [0, 60])
def test_open_run_over_its_longest_duration_raises_the_alert(statuses: type[UserStatus], newer: int) -> None:
    _open(seconds_ago=61)
    for _ in range(newer):
        _ended("skipped", reason="deduplicated", took_s=0)
        _ended("done", took_s=1)

    assert _names(_MINUTE) == ["longest_run"]


@pytest.mark.parametrize(("seconds_ago", "rings"), [(89, []), (90, []), (91, ["stuck"])])
def test_run_a_minute_over_its_runtime_is_stuck_although_it_sends_heartbeats(
    statuses: type[UserStatus], seconds_ago: float, rings: list[str]
) -> None:
    _open(seconds_ago=seconds_ago)

    assert _names() == rings


@pytest.mark.parametrize(("silent_s", "rings"), [(115, []), (125, ["stuck"])])
def test_silent_run_that_no_run_takes_over_is_stuck(
    statuses: type[UserStatus], silent_s: float, rings: list[str]
) -> None:
    _open(heartbeat=NOW - timedelta(seconds=silent_s))
    _ended("skipped", reason="deduplicated", seconds_ago=0, took_s=0)

    assert _names() == rings


def test_stuck_alert_names_the_oldest_run_and_what_to_do(statuses: type[UserStatus]) -> None:
    first = _open(seconds_ago=540)
    _open(seconds_ago=480)
    _open()

    [alert] = [each for each in worker_status(sweep, _NOW, _UTC).alarms if each.name == "stuck"]

    assert str(alert) == (
        f"run {first} has not ended since 2025-12-31 23:51:30 UTC, for 9 min, over 1.5 min; 1 more run is stuck. "
        f"Look: housekeeping runs {first}; then restart its process, worker-1:4711"
    )
    assert (alert.value, alert.limit, alert.since) == (540, 90, _NOW - timedelta(seconds=450))


def _process(message_id: str, busy_s: float, worker: str = sweep.name) -> Processes:
    thread = {"name": "Worker-3", "worker": worker, "message_id": message_id, "frame": "socket.py:7 f"}
    process: dict[str, Any] = {"kind": "worker", "host": "worker-1", "pid": 4711, "version": "1", "up_s": 9e4}
    heartbeat = Heartbeat(**process, busy_threads=[BusyThread(**thread, busy_s=busy_s)])
    return Processes((Process(heartbeat, _NOW, 1.0),))


def test_stuck_alert_says_where_the_thread_is(statuses: type[UserStatus]) -> None:
    run_id = _open(seconds_ago=540)
    Run.update(message_id="m1").where(Run.id == run_id).execute()

    [alert] = _stuck(_process("m1", 540))

    assert str(alert).endswith("restart its process, worker-1:4711: its thread Worker-3 is at socket.py:7 f")


@pytest.mark.parametrize(("busy_s", "rings"), [(88, 0), (90, 1)])
def test_thread_inside_a_run_that_was_taken_over_is_stuck(
    statuses: type[UserStatus], busy_s: float, rings: int
) -> None:
    _ended("lost", seconds_ago=20)
    _ended("done", seconds_ago=10, took_s=5)

    found = _stuck(_process("m1", busy_s))

    assert len(found) == rings
    assert all("a thread has not left its run since 2025-12-31 23:58:59 UTC" in str(each) for each in found)
    assert all(str(each).endswith("worker-1:4711: its thread Worker-3 is at socket.py:7 f") for each in found)


def test_busy_thread_of_another_worker_is_none_of_its_runs(statuses: type[UserStatus]) -> None:
    assert _stuck(_process("m1", 9_000, "shop.carts")) == []


def _stuck(processes: Processes) -> list[Alert]:
    return [each for each in worker_status(sweep, _NOW, _UTC, processes=processes).alarms if each.name == "stuck"]


@pytest.mark.parametrize(("ends", "rings"), [(False, ["unconfirmed"]), (True, [])])
def test_run_that_waits_for_a_confirmation_keeps_its_alert_until_a_run_ends(
    statuses: type[UserStatus], ends: bool, rings: list[str]
) -> None:
    guarded = dataclasses.replace(sweep, guard=dataclasses.replace(sweep.guard, first_run=True))
    found = {"stale": 9_000, "exact": True, "limit": 1_000, "rows": 9_000, "table": "x"}
    counted = {"unconfirmed": {**found, "worker": sweep.name, "changed": False}}
    _ended("skipped", reason="unconfirmed", counts=counted)
    _ended("done" if ends else "skipped", reason=None if ends else "deduplicated", took_s=1)
    _open()

    assert [each.name for each in worker_status(guarded, _NOW, _UTC).alarms] == rings


def test_lost_run_and_long_purge_are_not_stuck(statuses: type[UserStatus]) -> None:
    _open(seconds_ago=9_000, counts={"purge": {}})
    _ended("lost", seconds_ago=20, took_s=9_000)
    _ended("done", seconds_ago=10, took_s=5)

    assert "stuck" not in _names()


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

    assert _names(Alerts(overdue=limit)) == rings


@pytest.mark.parametrize(
    ("outcome", "rings"),
    [
        ("failed", ["last_run"]),
        ("lost", ["last_run"]),
        ("lost_lease", ["last_run"]),
        ("done", []),
        ("partial", []),
        ("skipped", ["last_run"]),
        ("missed", ["last_run"]),
    ],
)
def test_only_the_last_failed_run_raises_an_alert(statuses: type[UserStatus], outcome: str, rings: list[str]) -> None:
    _ended("failed", seconds_ago=60)
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

    assert [name for name in _names(Alerts(failed_runs=3)) if name != "last_run"] == rings


@pytest.mark.parametrize(("limit", "rings"), [(60, ["failed_runs"]), (61, [])])
def test_alert_about_failed_runs_reads_as_many_runs_as_its_limit(
    statuses: type[UserStatus], limit: int, rings: list[str]
) -> None:
    for _ in range(60):
        _ended("failed")

    assert [name for name in _names(Alerts(failed_runs=limit)) if name != "last_run"] == rings


def test_last_success_is_the_last_run_that_did_its_work(statuses: type[UserStatus]) -> None:
    _ended("done", seconds_ago=900)
    _ended("partial", reason="limit", seconds_ago=800)
    _ended("partial", reason="shutdown", seconds_ago=700)
    _ended("failed", reason="gone", seconds_ago=600)
    _ended("skipped", reason="lease_held", seconds_ago=500)

    seen = worker_status(sweep, _NOW, _UTC)

    assert seen.last_success == _NOW - timedelta(seconds=800)
    assert as_json(seen)["last_success_at"] == "2025-12-31T23:47:10+00:00"


def test_worker_that_never_did_its_work_has_no_last_success(statuses: type[UserStatus]) -> None:
    _ended("failed", reason="gone")

    assert as_json(worker_status(sweep, _NOW, _UTC))["last_success_at"] is None


def test_hourly_rates_come_from_the_last_runs(statuses: type[UserStatus]) -> None:
    _ended("done", counts={"deleted_rows": 9}, seconds_ago=3620, backlog=10)
    _ended("done", counts={"deleted_rows": 60}, seconds_ago=20, backlog=40)

    seen = worker_status(sweep, _NOW, _UTC)

    assert seen.rates == Rates(drained=60, arrived=90)
    assert (as_json(seen)["processed_per_hour"], as_json(seen)["arrived_per_hour"]) == (60, 90)


def test_every_alert_is_explained_on_the_page_and_in_the_docs(statuses: type[UserStatus]) -> None:
    _ended(
        "failed", error="gone", counts={"failed": 1, "deleted_rows": 9, "clock_skew_s": 6}, seconds_ago=400, took_s=999
    )
    statuses.drop_table()
    limits = dataclasses.replace(sweep.alerts, most={"deleted_rows": 5}, failed_runs=1)

    rings = worker_status(dataclasses.replace(sweep, alerts=limits), _NOW, _UTC).alarms

    documented = re.findall(r"^\| `(\w+…?)`", _ALARMS_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    topics = {alert_help.topic(alarm.name) for alarm in rings}
    of_last_run = {"longest_run", "failed_rows", "most_…", "failed_runs", "last_run", "clock"}
    assert topics == of_last_run | {"overdue", "unseen", "late"}
    assert topics | {"backlog", "breaker", "throttled", "stuck"} <= set(documented) == set(alert_help.ALERTS)


def test_rejected_records_are_shown_by_argument_and_cause(statuses: type[UserStatus]) -> None:
    for rows in range(1, 13):
        found = {"the cause": Rejected(rows, {"record": {"id": rows}, "error": "no"})}
        record(sweep.name, str(rows), found, complete=True, delayed=True, position=(rows,))
    record("another.worker", "", {"x": Rejected(99, {})}, complete=True, delayed=True, position=None)

    shown = as_json(worker_status(sweep, datetime.now(UTC), _UTC))

    assert [each["rows"] for each in shown["rejected"]] == list(range(12, 2, -1))
    assert shown["rejected_more"] == 2
    first = shown["rejected"][0]
    assert (first["argument"], first["cause"], first["sample"]["record"]) == ("12", "the cause", {"id": 12})
    assert first["since"] <= first["last_at"] < first["not_before"]


def test_failed_runs_are_shown_before_rejected_records(statuses: type[UserStatus]) -> None:
    for argument, rows in (("1", 99), ("2", 0)):
        found = {"the cause": Rejected(rows, {"record": {}, "error": "no"})}
        record(sweep.name, argument, found, complete=False, delayed=True, position=None)

    shown = as_json(worker_status(sweep, datetime.now(UTC), _UTC))

    assert [each["argument"] for each in shown["rejected"]] == ["2", "1"]
