"""Status of many workers while some tables are locked or slow: each of them delays only its own worker."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from peewee import BigIntegerField, DateTimeField

import housekeeping
from housekeeping import BaseModel, Delete
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.conftest import AddStatuses, Locked
from tests.internals.database import Database
from tests.internals.insight import WorkerStatus, next_tick, status, worker_statuses
from tests.internals.ledger import Override, Run
from tests.internals.sweeps import Backlog
from tests.internals.workers import status_sweep as sweep

_NOW = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
_UTC = ZoneInfo("UTC")


def read(*sweeps: Any) -> dict[str, WorkerStatus]:
    return {each.worker: each for each in worker_statuses(sweeps, _NOW, _UTC)}


@pytest.fixture
def events(postgres: Database) -> Any:
    """Sweep of another table, with one stale row."""
    postgres.execute_sql("CREATE TABLE events (id bigint PRIMARY KEY, at timestamptz NOT NULL)")
    postgres.execute_sql("INSERT INTO events VALUES (1, '2020-01-01')")

    class Event(BaseModel):
        id = BigIntegerField(primary_key=True)
        at = DateTimeField()

        class Meta:
            table_name = "events"

    return housekeeping.Sweep(
        "test.events",
        housekeeping.Rows(Event, stale=lambda row, now: row.at < now - timedelta(days=1), order="at", action=Delete()),
    )


def test_locked_table_is_an_alert_of_its_worker_alone(locked: Locked, add_statuses: AddStatuses, events: Any) -> None:
    add_statuses(3, "'2020-01-01'::timestamptz")
    Run.insert(
        worker=sweep.name,
        trigger="cli",
        started_at=_NOW - timedelta(minutes=12),
        heartbeat_at=_NOW,
        finished_at=_NOW - timedelta(minutes=11),
        outcome="done",
        counts={},
        backlog=5,
        backlog_exact=True,
    ).execute()

    with locked("LOCK TABLE user_statuses IN ACCESS EXCLUSIVE MODE"):
        found = read(sweep, events)

    assert (found["test.events"].waiting, found["test.events"].alarms) == (Backlog(1), [])
    statuses = found[sweep.name]
    [alert] = [each for each in statuses.alarms if each.name == "unseen"]
    assert alert.text.startswith('the backlog cannot be counted: "user_statuses" is locked by process ')
    assert "LOCK TABLE user_statuses" in alert.text
    assert (statuses.waiting, statuses.counted_at) == (Backlog(5), _NOW - timedelta(minutes=11))
    assert statuses.last_run is not None and statuses.last_run.outcome == "done"


def test_locked_dependents_are_an_alert_with_the_command_that_names_the_session(
    locked: Locked, postgres: Database
) -> None:
    postgres.execute_sql(
        "CREATE TABLE closed (id int PRIMARY KEY, at timestamptz);"
        "CREATE TABLE visit (id int PRIMARY KEY, closed_id int REFERENCES closed ON DELETE CASCADE)"
    )
    rows = housekeeping.Rows("closed", stale=lambda row, now: row.at < now, action=Delete(dependents=True))

    with locked("LOCK TABLE visit"):
        found = read(housekeeping.Sweep("test.closed", rows))

    [text] = [each.text for each in found["test.closed"].alarms if each.name == "unseen"]
    assert text.endswith("lock timeout; to see which session holds the lock: housekeeping doctor --database")


def test_workers_that_there_is_no_time_for_show_their_ledger(
    statuses: type[UserStatus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_BUDGET_S", 0)

    alerts = read(sweep)[sweep.name].alarms

    assert [alert.name for alert in alerts] == ["unseen", "late"]
    assert all("took too long" in alert.text for alert in alerts)


@pytest.mark.parametrize(
    ("until", "expected"), [(None, None), (datetime(2026, 1, 1, 5, 30, 30, tzinfo=UTC), "2026-01-01 05:31")]
)
def test_paused_worker_has_no_tick_before_the_end_of_its_pause(
    statuses: type[UserStatus], until: datetime | None, expected: str | None
) -> None:
    tick = next_tick(sweep, _NOW, _UTC, Override(sweep.name, "paused", until=until))

    assert (tick and f"{tick:%Y-%m-%d %H:%M}") == expected
