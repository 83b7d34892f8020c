"""Failures of calls: which fail a row, and which fail the run."""

from __future__ import annotations

import urllib.error
from typing import Any

import pytest
from peewee import AutoField, IntegerField

from housekeeping import BaseModel, Call, Delete, Rows, Sweep
from housekeeping.testing.stubs import ManualClock
from tests.integration.sweeps.orders import Order, Outside, add, expired, sweep
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.session_settings import set_in_session


@pytest.fixture(autouse=True)
def orders(postgres: Database) -> None:
    postgres.create_tables([Order])


def refused_connection() -> urllib.error.URLError:
    """As urllib has it: not a ConnectionError, but come from one."""
    error = urllib.error.URLError("refused")
    error.__context__ = ConnectionRefusedError("refused")
    return error


def test_row_whose_call_fails_fails_alone(clock: ManualClock, reported: list[dict[str, Any]]) -> None:
    add(4)
    outside = Outside(2)

    result = run_sweep(sweep(outside), clock=clock)

    assert (result.outcome, result.counts["moved_rows"], result.counts["failed"]) == ("done", 3, 1)
    assert (outside.asked, expired()) == ([1, 2, 3, 4], [1, 3, 4])
    assert [(each["id"], str(each["error"])) for each in reported] == [(2, "no such order")]


def test_unavailable_service_fails_the_run_after_its_successes_commit(clock: ManualClock) -> None:
    add(5)
    away = refused_connection()
    outside = Outside(3, error=away)

    result = run_sweep(sweep(outside, batch=10), clock=clock)

    assert (result.outcome, result.counts["moved_rows"], result.counts["failed"]) == ("failed", 2, 0)
    assert result.error is away
    assert outside.asked == [1, 2, 3, 3], "the rows behind it are left alone"
    assert expired() == [1, 2]


def test_timeout_fails_its_row_unless_declared_as_unavailability(clock: ManualClock) -> None:
    add(3)
    slow = Outside(1, error=TimeoutError("timed out"))

    named = run_sweep(sweep(slow, unavailable_errors=(TimeoutError,)), clock=clock)
    unnamed = run_sweep(sweep(slow), clock=clock)

    assert (named.outcome, named.counts["failed"]) == ("failed", 0)
    assert (unnamed.outcome, unnamed.counts["failed"], expired()) == ("done", 1, [2, 3])


def test_error_raised_from_none_has_no_cause() -> None:
    error = ValueError("the answer was no")
    error.__context__ = ConnectionResetError()
    call = Call(print, then=Delete())

    before = call.is_unavailable(error)
    error.__suppress_context__ = True

    assert (before, call.is_unavailable(error)) == (True, False)


def test_row_rejected_at_the_commit_fails_alone(clock: ManualClock, postgres: Database) -> None:
    add(8)
    refuse(postgres, 2, "AFTER UPDATE", "CONSTRAINT TRIGGER", "DEFERRABLE INITIALLY DEFERRED")
    outside = Outside(4)

    result = run_sweep(sweep(outside), clock=clock)

    assert (result.outcome, result.counts["moved_rows"], result.counts["failed"]) == ("done", 6, 2)
    assert (outside.asked, expired()) == ([1, 2, 3, 4, 5, 6, 7, 8], [1, 3, 5, 6, 7, 8])


def refuse(postgres: Database, number: int, when: str, kind: str, how: str = "") -> None:
    """Let the database raise an error when this order changes."""
    postgres.execute_sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN IF new.id = {number} THEN RAISE 'this one stays'; END IF; RETURN new; END $$"
    )
    postgres.execute_sql(f"CREATE {kind} refused {when} ON orders {how} FOR EACH ROW EXECUTE FUNCTION refuse()")


def test_read_only_server_fails_the_run_but_no_row(
    clock: ManualClock, postgres: Database, reported: list[dict[str, Any]]
) -> None:
    add(3)

    def fail_over(order: Order) -> None:
        set_in_session(postgres, "default_transaction_read_only = on")

    result = run_sweep(sweep(fail_over), clock=clock)
    set_in_session(postgres, "default_transaction_read_only = off")

    assert (result.outcome, result.counts["failed"], expired()) == ("failed", 0, [])
    assert len(reported) == 1, "the run, not three rows"


def test_failed_whole_batch_is_called_row_by_row(clock: ManualClock) -> None:
    add(3)
    outside = Outside(2)

    result = run_sweep(sweep(outside.all, whole_batch=True), clock=clock)

    assert (result.counts["moved_rows"], result.counts["failed"]) == (2, 1)
    assert (outside.asked, expired()) == ([3, 1, 1, 1], [1, 3])


def test_row_whose_value_cannot_be_read_fails_alone(postgres: Database, reported: list[dict[str, Any]]) -> None:
    class Size(IntegerField):
        def python_value(self, value: Any) -> Any:
            return {1: "small", 2: "large"}[value]

    class Parcel(BaseModel):
        id = AutoField()
        size = Size()

    postgres.create_tables([Parcel])
    postgres.execute_sql("INSERT INTO parcel (size) VALUES (1), (7), (2)")
    called: list[str] = []
    parcels = Sweep(
        "shop.parcels",
        Rows(
            Parcel, stale=lambda row: row.id > 0, action=Call(lambda parcel: called.append(parcel.size), then=Delete())
        ),
    )

    result = run_sweep(parcels)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 2, 1)
    assert (called, [each["id"] for each in reported]) == (["small", "large"], [2])
