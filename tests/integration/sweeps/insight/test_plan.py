from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from peewee import BigAutoField, InternalError

from housekeeping import BaseModel, Delete, Rows, Sweep, UtcDateTimeField
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.conftest import AddStatuses, Locked
from tests.internals.core import DatabaseUnavailable
from tests.internals.database import Database, connect_to, database
from tests.internals.engine import run_sweep
from tests.internals.insight import as_json, dry_run, plan
from tests.internals.workers import status_sweep as sweep

_NOW = "'2026-01-01 00:00:00+00'::timestamptz"


def test_plan_counts_the_rows_that_the_run_then_changes(
    add_statuses: AddStatuses, statuses: type[UserStatus], clock: ManualClock
) -> None:
    add_statuses(150, f"{_NOW} - interval '1 second' * n")
    add_statuses(1, _NOW, first_id=1000)
    add_statuses(7, f"{_NOW} + interval '1 microsecond' * n", first_id=2000)

    planned = plan(sweep, clock=clock)
    result = run_sweep(sweep, clock=clock)

    assert (planned.stale.rows, planned.batches) == (151, 2)
    assert (result.counts["deleted_rows"], result.counts["batches"]) == (151, 2)


def test_plan_transaction_is_read_only(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(1, _NOW)

    def write(now: object) -> Any:
        assert database.in_transaction(), "only in the plan, not at the declaration"
        return UserStatus.delete().execute()

    writing = Sweep("w", Rows(UserStatus, stale=lambda row, now: write(now), order="user_id", action=Delete()))

    with pytest.raises(InternalError, match="read-only transaction"):
        plan(writing, clock=clock)


def test_plan_shows_oldest_newest_and_sample_rows(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(9, f"{_NOW} - interval '1 hour' * n")

    planned = as_json(plan(sweep, clock=clock))

    assert planned["oldest"] == "2025-12-31T15:00:00+00:00"
    assert planned["newest"] == "2025-12-31T23:00:00+00:00"
    (only,) = planned["stages"]
    assert [row["user_id"] for row in only["samples"]] == [9, 8, 7, 6, 5]


class Ticket(BaseModel):
    id = BigAutoField()
    closed_at = UtcDateTimeField(null=True)


def _tickets(stale: Callable[[Any, datetime], Any]) -> Sweep:
    return Sweep("shop.tickets", Rows(Ticket, stale=stale, order="closed_at", action=Delete()))


@pytest.fixture
def tickets(postgres: Database, clock: ManualClock) -> None:
    """Two tickets of an hour ago, three of the day after tomorrow, one without a time."""
    postgres.create_tables([Ticket])
    times = [clock.now() - timedelta(hours=1)] * 2 + [clock.now() + timedelta(days=2)] * 3 + [None]
    Ticket.insert_many([{"closed_at": at} for at in times]).execute()


def test_plan_warns_of_stale_rows_in_the_future(tickets: None, clock: ManualClock) -> None:
    planned = plan(_tickets(lambda row, now: row.closed_at < now + timedelta(days=14)), clock=clock)

    assert planned.warnings == [
        "3 stale rows are in the future (closed_at); check the direction of the comparison in `stale`"
    ]
    assert as_json(planned)["warnings"] == planned.warnings


def test_plan_says_how_many_stale_rows_have_no_time(tickets: None, clock: ManualClock) -> None:
    planned = plan(_tickets(lambda row, now: (row.closed_at < now) | row.closed_at.is_null()), clock=clock)

    assert planned.warnings == ["1 stale row is NULL in closed_at; a run takes such rows last"]
    assert planned.newest == clock.now() - timedelta(hours=1)


@pytest.mark.parametrize(
    ("stale", "number"),
    [
        (lambda row, now: row.closed_at > now - timedelta(days=14), "2 of the first 2 stale rows"),
        (lambda row, now: (row.closed_at > now - timedelta(days=14)) & (row.id == 1), "the only stale row"),
    ],
)
def test_plan_warns_of_an_inverted_comparison(
    tickets: None, clock: ManualClock, stale: Callable[[Any, datetime], Any], number: str
) -> None:
    Ticket.delete().where(Ticket.closed_at > clock.now()).execute()

    planned = plan(_tickets(stale), clock=clock)

    assert planned.warnings == [
        f"{number} will not be stale when older: `stale` takes newer rows and leaves older ones; check the direction "
        "of its comparison"
    ]


@pytest.mark.parametrize(("rows", "shown"), [(4, "4"), (5, "5"), (6, "at least 5")])
def test_plan_counts_up_to_the_limit(add_statuses: AddStatuses, clock: ManualClock, rows: int, shown: str) -> None:
    add_statuses(rows, _NOW)

    planned = plan(sweep, clock=clock, limit=5)

    assert str(planned.stale) == shown


def test_rows_locked_elsewhere_are_counted_and_not_waited_for(
    add_statuses: AddStatuses, locked: Locked, clock: ManualClock
) -> None:
    add_statuses(3, _NOW)

    with locked("SELECT * FROM user_statuses FOR UPDATE"):
        planned = plan(sweep, clock=clock)

    assert planned.stale.rows == 3


def test_dry_run_without_the_table_fails(postgres: Database, clock: ManualClock) -> None:
    result = dry_run(sweep, clock=clock)

    assert (result.outcome, result.reason) == ("failed", 'relation "user_statuses" does not exist')
    assert result.counts == {"deleted_rows": 0, "batches": 0, "out_of_time": False}


def test_dry_run_without_a_server_fails(clock: ManualClock) -> None:
    database.initialize(connect_to("postgresql://me:hunter2@localhost:1/db"))

    result = dry_run(sweep, clock=clock)
    database.initialize(None)

    assert (result.outcome, type(result.error)) == ("failed", DatabaseUnavailable)
