"""The promise of age: an alert while rows stay stale for too long, however the runs end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Alerts, Delete, Rows, Sweep
from tests.declarations import changed
from tests.integration.conftest import AddStatuses, Locked
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.insight import Alert, worker_status
from tests.internals.ledger import Run
from tests.internals.workers import status_sweep

NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)
DAY: Final = timedelta(days=1)
SWEEP: Final = changed(status_sweep, alerts=Alerts(late=DAY, overdue=None))


def note(name: str, order: str, stale: Any, **more: Any) -> Sweep:
    return Sweep(name, Rows("notes", stale=stale, order=order, action=Delete(), **more), alerts=Alerts(late=DAY))


AGED: Final = note("notes.aged", "id", lambda row, now: row.written_at < now, age=timedelta(days=30))


def late(sweep: Sweep, now: datetime = NOW) -> Alert | None:
    return next((alert for alert in worker_status(sweep, now, UTC).alarms if alert.name == "late"), None)


@pytest.fixture
def notes(postgres: Database, admin: Connection) -> Connection:
    with admin.cursor() as cursor:
        cursor.execute("CREATE TABLE notes (id integer PRIMARY KEY, written_at timestamptz, is_old boolean)")
    return admin


def add_note(notes: Connection, days_old: float, id: int = 1) -> None:
    with notes.cursor() as cursor:
        cursor.execute("INSERT INTO notes VALUES (%s, %s, true)", (id, NOW - timedelta(days=days_old)))


@pytest.mark.parametrize(("seconds", "is_late"), [(-1, False), (1, True)])
def test_row_is_late_once_it_is_older_than_age_and_promise(notes: Connection, seconds: int, is_late: bool) -> None:
    add_note(notes, 31 + seconds / 86_400)

    assert (late(AGED) is not None) is is_late


def test_late_alert_names_the_oldest_row_its_age_and_the_limit(add_statuses: AddStatuses) -> None:
    add_statuses(2, "'2026-01-01 00:00+00'::timestamptz - n * interval '2 days'")

    alert = late(SWEEP)

    assert alert is not None and (alert.limit, alert.value) == (86_400, 4 * 86_400)
    assert alert.text == "rows stay stale for over 24 h; the oldest one is from 2025-12-28 00:00:00 UTC, 4 d ago"


def test_done_runs_that_pass_over_a_locked_row_are_late(add_statuses: AddStatuses, locked: Locked) -> None:
    add_statuses(3, "now() - interval '2 days'")
    with locked("SELECT 1 FROM user_statuses WHERE user_id = 2 FOR UPDATE"):
        outcome = run_sweep(SWEEP).outcome

    assert (outcome, late(SWEEP, datetime.now(UTC)) is not None) == ("done", True)


def test_row_with_null_in_the_order_is_late_without_a_time(notes: Connection) -> None:
    sweep = note("notes.null", "is_old", lambda row, now: row.written_at < now)
    add_note(notes, 2)
    with notes.cursor() as cursor:
        cursor.execute("UPDATE notes SET is_old = NULL")

    alert = late(sweep)

    assert alert is not None and (alert.text, alert.value) == ("rows stay stale for over 24 h", None)


def test_row_on_hold_is_not_late(notes: Connection) -> None:
    add_note(notes, 99)

    assert late(changed(AGED, hold=lambda row: row.is_old)) is None


def test_predicate_without_its_time_is_late_by_the_order(notes: Connection) -> None:
    sweep = note("notes.flagged", "written_at", lambda row: row.is_old)
    add_note(notes, 0.9)
    before = late(sweep)
    add_note(notes, 1.1, id=2)

    assert before is None and late(sweep) is not None


def test_predicate_by_day_is_late_at_any_time_of_the_day(notes: Connection) -> None:
    sweep = note(
        "notes.by_day", "id", lambda row, now: row.written_at < datetime(now.year, now.month, now.day, tzinfo=UTC)
    )
    add_note(notes, 2)

    alert = late(sweep, NOW + timedelta(hours=12))

    assert alert is not None and alert.text == "rows stay stale for over 24 h"


def test_age_that_cannot_be_read_is_an_alert(notes: Connection) -> None:
    sweep = note("notes.unknown", "id", lambda row: row.is_old)
    none = late(sweep)
    add_note(notes, 0)

    alert = late(sweep)

    assert none is None and alert is not None
    assert alert.text.startswith("the age of the oldest stale row cannot be read: stage rows is not ordered by a time")


def test_disabled_sweep_promises_nothing(add_statuses: AddStatuses) -> None:
    add_statuses(1, "'2025-01-01'::timestamptz")

    assert late(changed(SWEEP, enabled=False)) is None


def test_rows_are_read_again_after_a_run_or_five_minutes(add_statuses: AddStatuses) -> None:
    run_sweep(SWEEP)
    add_statuses(1, "now()")
    now = datetime.now(UTC)
    first = late(SWEEP, now)
    add_statuses(1, "now() - interval '2 days'", first_id=2)

    within, after = late(SWEEP, now + timedelta(minutes=4)), late(SWEEP, now + timedelta(minutes=5))
    Run.update(finished_at=now).execute()
    of_another_run = late(SWEEP, now)

    assert (first, within) == (None, None)
    assert after is not None and of_another_run is not None
