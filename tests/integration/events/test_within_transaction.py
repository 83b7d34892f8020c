"""Handlers within the batch's transaction."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import psycopg2
import pytest
from peewee import AutoField, IntegerField

from housekeeping import BaseModel, Delete, Event, Rows, Sweep, events
from housekeeping.testing.stubs import ManualClock
from tests.integration.events.conftest import On
from tests.integration.events.orders import NOW, Notice, Order, left, note, noted, orders_expired, sweep
from tests.internals.core import DeclarationError, TransactionEnded
from tests.internals.database import Database, database
from tests.internals.engine import run_sweep
from tests.internals.ledger import Run

ALL = list(range(1, 11))


def run(what: Sweep = sweep) -> Any:
    return run_sweep(what, clock=ManualClock(NOW))


def failing_for(ids: set[int], error: BaseException) -> Any:
    """Return a handler that writes notices, and then raises for these orders."""

    def handler(connection: Any, rows: list[dict[str, Any]], *, worker: str, run_id: int | None) -> None:
        note(connection, rows, worker=worker, run_id=run_id)
        if ids & {row["order_id"] for row in rows}:
            raise error

    return handler


def test_handler_gets_rows_and_writes_in_the_batch(orders: type[Order], on: On) -> None:
    given: list[Any] = []

    def handler(connection: Any, rows: list[dict[str, Any]], *, worker: str, run_id: int | None) -> None:
        given.append((connection is database.connection(), database.in_transaction(), len(rows), worker, run_id))
        note(connection, rows, worker=worker, run_id=run_id)

    on(orders_expired, handler, within_transaction=True)
    result = run()

    assert (result.outcome, result.counts["deleted_rows"], noted(), left()) == ("done", 10, ALL, [11])
    assert given == [(True, True, size, sweep.name, result.run_id) for size in (4, 4, 2)]


@pytest.mark.parametrize("error", [ValueError("no customer"), KeyError("no"), psycopg2.errors.CheckViolation("no")])
def test_row_whose_handler_raises_stays_alone(
    orders: type[Order], on: On, reported: list[dict[str, Any]], error: BaseException
) -> None:
    on(orders_expired, failing_for({2, 7}, error), within_transaction=True)

    result = run()

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 8, 2)
    assert (left(), noted()) == ([2, 7, 11], [1, 3, 4, 5, 6, 8, 9, 10])
    assert {sample["id"] for about in reported for sample in about["samples"]} == {2, 7}
    assert "failing_for" in str(reported[0]["error"]) and reported[0]["error"].__cause__ is not None


def test_handler_that_leaves_an_error_behind_fails_the_row(orders: type[Order], on: On) -> None:
    Notice.create(order_id=3)

    def swallow(connection: Any, rows: list[dict[str, Any]], *, worker: str, run_id: int | None) -> None:
        try:
            note(connection, rows, worker=worker, run_id=run_id)
        except psycopg2.Error:
            pass

    on(orders_expired, swallow, within_transaction=True)
    result = run()

    assert (result.counts["deleted_rows"], result.counts["failed"], left()) == (9, 1, [3, 11])


def selecting_from_no_table(ids: set[int]) -> Any:
    """Return a handler that sends a wrong statement for these orders."""

    def handler(connection: Any, rows: list[dict[str, Any]], **about: Any) -> None:
        note(connection, rows, **about)
        if ids & {row["order_id"] for row in rows}:
            connection.cursor().execute("SELECT 1 FROM no_such_table")

    return handler


def test_handler_that_is_wrong_for_every_row_fails_the_run(orders: type[Order], on: On) -> None:
    on(orders_expired, selecting_from_no_table(set(ALL)), within_transaction=True)

    result = run()

    assert result.outcome == "failed" and "no_such_table" in str(result.reason)
    assert (result.counts["deleted_rows"], result.counts.get("failed", 0), left()) == (0, 0, [*ALL, 11])


@pytest.mark.parametrize("error", [ConnectionRefusedError("away"), psycopg2.OperationalError("away")])
def test_error_unrelated_to_rows_fails_the_run(orders: type[Order], on: On, error: BaseException) -> None:
    on(orders_expired, failing_for({6}, error), within_transaction=True)

    result = run()

    assert (result.outcome, result.counts["deleted_rows"], result.counts.get("failed", 0)) == ("failed", 4, 0)
    assert (left(), noted()) == ([5, 6, 7, 8, 9, 10, 11], [1, 2, 3, 4])


def commit(connection: Any) -> None:
    connection.commit()


def roll_back(connection: Any) -> None:
    connection.rollback()


def use_as_context(connection: Any) -> None:
    with connection:
        pass


def close(connection: Any) -> None:
    connection.close()


@pytest.mark.parametrize("end", [commit, roll_back, use_as_context, close])
def test_handler_cannot_end_the_transaction(orders: type[Order], on: On, end: Any) -> None:
    on(orders_expired, lambda connection, rows, **about: end(connection), within_transaction=True)

    result = run()

    assert (result.outcome, type(result.error), left()) == ("failed", TransactionEnded, [*ALL, 11])


@pytest.mark.parametrize("sql", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK AND CHAIN"])
@pytest.mark.parametrize("raises", [False, True])
def test_transaction_ended_by_a_statement_is_detected(orders: type[Order], on: On, sql: str, raises: bool) -> None:
    def handler(connection: Any, rows: list[dict[str, Any]], **about: Any) -> None:
        connection.cursor().execute(sql)
        if raises:
            raise ValueError("as well")

    on(orders_expired, handler, within_transaction=True)
    result = run()

    assert (result.outcome, type(result.error)) == ("failed", TransactionEnded)
    assert "Remove the COMMIT or ROLLBACK" in str(result.error)
    assert Run.get_by_id(result.run_id).outcome == "failed"
    assert result.counts["failed" if "failed" in result.counts else "deleted_rows"] == 0
    assert not database.in_transaction()


def test_deadlock_in_a_handler_retries_the_batch(orders: type[Order], on: On) -> None:
    tries: list[int] = []

    def handler(connection: Any, rows: list[dict[str, Any]], **about: Any) -> None:
        tries.append(len(rows))
        note(connection, rows, worker="", run_id=None)
        if len(tries) == 1:
            with connection.cursor() as cursor:
                cursor.execute("DO $$ BEGIN RAISE 'chosen' USING ERRCODE = '40P01'; END $$")

    on(orders_expired, handler, within_transaction=True)

    assert (run().counts["deleted_rows"], tries, noted()) == (10, [4, 4, 4, 2], ALL)


def test_rows_are_read_back_only_with_a_listener(orders: type[Order], on: On, statements: list[str]) -> None:
    run()
    without = [sql for sql in statements if "customer" in sql]
    Order.create(customer="c", expires_at=NOW)
    on(orders_expired, note, within_transaction=True)
    run()

    assert not any('"customer", ' in sql and "DESC" not in sql for sql in without)
    assert noted() == [12]


def test_wrong_registration_is_rejected_with_the_right_form() -> None:
    wrong: Any = events.on
    with pytest.raises(DeclarationError, match=r"give within_transaction=True or outbox='name'; .*\.connect"):
        wrong(orders_expired, note)
    with pytest.raises(DeclarationError, match="give within_transaction=True or outbox"):
        wrong(orders_expired, note, within_transaction=True, outbox="x")
    with pytest.raises(DeclarationError, match="the object is gone before .* use outbox="):
        events.on(events.upload_deleted, note, within_transaction=True)


def test_object_that_is_no_event_is_rejected() -> None:
    wrong: Any = "name"

    with pytest.raises(DeclarationError, match="Event: 'name' is no event; write events.event"):
        Event(wrong)


@pytest.mark.parametrize("within_transaction", [True, False])
def test_value_that_a_field_cannot_read_is_given_as_stored(
    postgres: Database, on: On, within_transaction: bool
) -> None:
    class Size(IntegerField):
        def python_value(self, value: Any) -> Any:
            return {1: "small", 2: "large"}[value]

    class Parcel(BaseModel):
        id = AutoField()
        size = Size()

    deleted = events.event("shop.parcel_deleted")
    parcels = Sweep(
        "shop.parcels", Rows(Parcel, stale=lambda row: row.id > 0, action=Delete(), event=Event(deleted, "size"))
    )
    postgres.create_tables([Parcel])
    postgres.execute_sql("INSERT INTO parcel (size) VALUES (1), (7), (2)")
    given: list[Any] = []

    def handler(_: Any, rows: list[dict[str, Any]], **about: Any) -> None:
        given.extend(row["size"] for row in rows)

    if within_transaction:
        on(deleted, handler, within_transaction=True)
    with nullcontext() if within_transaction else deleted.connected_to(handler):
        result = run_sweep(parcels)

    assert (result.outcome, result.counts["deleted_rows"], given) == ("done", 3, ["small", 7, "large"])
