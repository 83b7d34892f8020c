from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from housekeeping.foundation.db import Database
from housekeeping.sweeps import ledger
from housekeeping.sweeps.declaration import Alarms
from housekeeping.sweeps.ledger import Counts
from housekeeping.sweeps.overview import overview
from housekeeping.sweeps.own_tables import Run, Switch
from housekeeping.sweeps.switches import is_paused, switched
from housekeeping.workers.user_status_cleanup.models import UserStatus
from housekeeping.workers.user_status_cleanup.worker import sweep
from tests.integration.conftest import AddStatuses

_NOW = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
_AT = "'2026-01-01 00:00:30+00'::timestamptz"


def _ended(outcome: str, *, reason: str | None = None, error: str | None = None, counts: Counts | None = None) -> None:
    Run.insert(
        worker=sweep.name,
        trigger="cli",
        started_at=_NOW - timedelta(seconds=90),
        heartbeat_at=_NOW,
        finished_at=_NOW - timedelta(seconds=20),
        outcome=outcome,
        reason=reason,
        error=error,
        counts=counts or {},
    ).execute()


def test_a_worker_that_never_ran_stands_by(statuses: type[UserStatus]) -> None:
    seen = overview(sweep, _NOW, ZoneInfo("UTC"))

    assert (seen.state, seen.last_run, seen.oldest, seen.alarms) == ("on", None, None, [])
    assert seen.next_tick == datetime(2026, 1, 1, 0, 1, tzinfo=UTC)


def test_the_next_tick_is_read_on_the_clock_of_the_zone_and_shown_in_utc(statuses: type[UserStatus]) -> None:
    nightly = dataclasses.replace(sweep, schedule="0 3 * * *")

    seen = overview(nightly, _NOW, ZoneInfo("Europe/Berlin"))

    assert seen.next_tick == datetime(2026, 1, 1, 2, tzinfo=UTC)


def test_the_backlog_and_the_oldest_are_those_of_the_run(add_statuses: AddStatuses) -> None:
    add_statuses(3, f"{_AT} - interval '1 hour' * (n - 1)")
    add_statuses(2, f"{_AT} + interval '1 microsecond' * n", first_id=100)

    seen = overview(sweep, _NOW, ZoneInfo("UTC"))

    assert (str(seen.waiting), seen.oldest) == ("3", _NOW - timedelta(hours=2))


def test_the_counts_of_the_last_run_come_in_the_worker_s_own_order(statuses: type[UserStatus]) -> None:
    _ended("done", counts={"a_former_count": 1, "out_of_time": False, "batches": 2, "deleted_rows": 3, "failed": 4})

    last = overview(sweep, _NOW, ZoneInfo("UTC")).as_json()["last_run"]

    assert list(last["counts"])[:3] == ["deleted_rows", "batches", "out_of_time"]
    assert (last["duration_s"], last["outcome"], len(last["counts"])) == (70, "done", 5)


def test_a_run_that_goes_on_has_no_outcome_yet(statuses: type[UserStatus]) -> None:
    ledger.begin(sweep.name, message_id=None, tick=None, trigger="cli", lease=None)

    last = overview(sweep, _NOW, ZoneInfo("UTC")).last_run

    assert last is not None
    assert (last["outcome"], last["duration_s"]) == (None, None)


@pytest.mark.parametrize(("rows", "rings"), [(4, []), (5, []), (6, ["more than 5 rows wait"])])
def test_a_backlog_above_the_limit_rings(add_statuses: AddStatuses, rows: int, rings: list[str]) -> None:
    add_statuses(rows, _AT)

    seen = overview(dataclasses.replace(sweep, alarms=Alarms(backlog=5)), _NOW, ZoneInfo("UTC"))

    assert [str(alarm) for alarm in seen.alarms] == rings


def test_a_last_run_that_took_long_or_failed_rings(statuses: type[UserStatus]) -> None:
    _ended("failed", reason="database: gone", error="gone", counts={"failed": 2})

    assert [str(alarm) for alarm in overview(sweep, _NOW, ZoneInfo("UTC")).alarms] == [
        "the last run took 70 s, over 60 s",
        "2 rows could not be settled",
        "the last run ended as failed: gone",
    ]


def test_a_table_that_is_not_there_is_this_worker_s_alarm(postgres: Database) -> None:
    seen = overview(sweep, _NOW, ZoneInfo("UTC"))

    assert (seen.waiting, seen.oldest, seen.as_json()["backlog"]) == (None, None, None)
    assert [str(alarm) for alarm in seen.alarms] == [
        'what waits cannot be seen: relation "user_statuses" does not exist'
    ]


def test_a_disabled_worker_has_no_next_tick(statuses: type[UserStatus]) -> None:
    seen = overview(dataclasses.replace(sweep, enabled=False), _NOW, ZoneInfo("UTC"))

    assert (seen.state, seen.next_tick) == ("disabled", None)


@pytest.mark.parametrize(
    ("until", "paused"), [("NULL", True), ("now() + interval '1 hour'", True), ("now() - interval '1 second'", False)]
)
def test_a_pause_lasts_until_its_end(postgres: Database, statuses: type[UserStatus], until: str, paused: bool) -> None:
    table = f'"{Switch._meta.schema}".switches'
    postgres.execute_sql(f"INSERT INTO {table} VALUES ('{sweep.name}', 'paused', 'too busy', {until})")

    assert (is_paused(sweep.name), sweep.name in switched()) == (paused, paused)
    assert (overview(sweep, _NOW, ZoneInfo("UTC")).state == "paused") == paused
