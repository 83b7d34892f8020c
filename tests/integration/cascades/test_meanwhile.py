"""Concurrent changes during a cascade, at each point between two of its statements."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from housekeeping.testing.stubs import ManualClock
from tests.integration.cascades import shop
from tests.integration.cascades.shop import NOW, Application, depending_on, ids, sweep
from tests.integration.statements import watch_statements
from tests.internals.database import database
from tests.internals.engine import run_sweep

CLOCK = ManualClock(NOW)
#: Many runs.
pytestmark = pytest.mark.slow

LEFT = {"account": [4], "orders": [7, 8], "item": [13, 14, 15, 16], "comment": [1, 2, 3, 4]}


def at_each_point(act: Callable[[], bool], check: Callable[[Any], None]) -> int:
    """Run the sweep once for each of its statements, and act right before that one; return how often it took effect."""
    effects = 0
    for point in range(1000):
        database.execute_sql("TRUNCATE account, orders, item, comment")
        shop.fill()
        seen, acted = 0, False

        def before(sql: str, point: int = point) -> None:
            nonlocal seen, acted
            seen += bool(seen or '"closed_at"' in sql)  # from the query of the parents on
            if seen == point + 1:
                acted = act()

        with pytest.MonkeyPatch.context() as patch:
            watch_statements(patch, before)
            result = run_sweep(sweep(), clock=CLOCK)
        assert result.outcome == "done", (point, result)
        if acted:
            effects += 1
            check(result)
        if seen <= point:
            return effects
    raise AssertionError("the run does not end")


def test_nothing_of_a_parent_is_touched_once_it_is_fresh(accounts: None, application: Application) -> None:
    kept: list[Any] = []

    def freshen() -> bool:
        kept[:] = depending_on(application, 2)
        return ("account", 2) in kept and application.execute("UPDATE account SET closed_at = NULL WHERE id = 2")

    def check(result: Any) -> None:
        assert depending_on(application, 2) == kept
        assert ids("account") == {"account": [2, 4]}
        assert result.counts["deleted_rows"] == 2

    assert at_each_point(freshen, check) > 10


def test_nothing_of_a_parent_is_touched_once_it_is_on_hold(accounts: None, application: Application) -> None:
    kept: list[Any] = []

    def hold() -> bool:
        kept[:] = depending_on(application, 2)
        return ("account", 2) in kept and application.execute("UPDATE account SET on_hold = true WHERE id = 2")

    def check(result: Any) -> None:
        assert depending_on(application, 2) == kept

    assert at_each_point(hold, check) > 10


def test_parent_with_a_new_dependent_stays_until_the_next_run(accounts: None, application: Application) -> None:
    def insert() -> bool:
        return application.execute("INSERT INTO orders VALUES (99, 2); INSERT INTO item VALUES (99, 99)")

    def check(result: Any) -> None:
        assert result.counts["failed"] == 0
        # No row has gone with its parent, without having been counted.
        gone = 28 + 2 - sum(map(len, ids("account", "orders", "item").values()))
        assert result.counts["deleted_rows"] + result.counts["deleted_dependents"] == gone
        assert set(ids("orders")["orders"]) <= {7, 8, 99}
        assert (99 in ids("orders")["orders"]) == (2 in ids("account")["account"])
        assert ids("item")["item"] in ([13, 14, 15, 16], [13, 14, 15, 16, 99])
        assert run_sweep(sweep(), clock=CLOCK).outcome == "done"
        assert ids() == LEFT

    assert at_each_point(insert, check) > 10


def test_dependents_that_move_to_a_parent_that_stays_are_not_touched(accounts: None, application: Application) -> None:
    """An order moves to another account, and its items with it."""
    kept: list[Any] = []

    def move() -> bool:
        before = application.rows("SELECT id FROM item WHERE order_id = 3 ORDER BY id")
        if not application.rows("SELECT FROM orders WHERE id = 3"):
            return False
        kept[:] = before
        return application.execute("UPDATE orders SET account_id = 4 WHERE id = 3")

    def check(result: Any) -> None:
        assert application.rows("SELECT id FROM item WHERE order_id = 3 ORDER BY id") == kept
        assert application.rows("SELECT account_id FROM orders WHERE id = 3") == [(4,)]
        assert ids("account") == {"account": [4]}

    assert at_each_point(move, check) > 10


@pytest.mark.parametrize("partitioned", [False, True])
def test_dependents_that_move_during_a_full_batch_are_not_touched(
    accounts: None, application: Application, partitioned: bool
) -> None:
    """Items move to the order of an open account once the statement that deletes them has begun."""
    if partitioned:
        database.execute_sql(
            "ALTER TABLE item RENAME TO before; CREATE TABLE item (id bigint PRIMARY KEY,"
            " order_id bigint NOT NULL REFERENCES orders ON DELETE CASCADE) PARTITION BY RANGE (id);"
            "CREATE TABLE item_all PARTITION OF item DEFAULT; CREATE INDEX ON item (order_id);"
            "INSERT INTO item SELECT * FROM before; DROP TABLE before"
        )
    database.execute_sql("INSERT INTO item SELECT n, 1 + mod(n, 6) FROM generate_series(101, 400) AS n")
    database.execute_sql(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF current_query() LIKE '%%housekeeping.batch%%' OR current_query() LIKE '%%EXECUTE%%' THEN"
        "  PERFORM pg_advisory_xact_lock(7);"
        "  WHILE NOT EXISTS (SELECT FROM item WHERE order_id = 7 AND id > 100) LOOP PERFORM pg_sleep(0.001); END LOOP;"
        " END IF; RETURN NULL; END $$;"
        "CREATE TRIGGER waits BEFORE DELETE ON item FOR EACH STATEMENT EXECUTE FUNCTION wait()"
    )
    moved: list[tuple[int]] = []

    def move() -> None:
        while not application.rows("SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 7"):
            if is_over.wait(0.001):
                return
        # The first order of the account that was closed first.
        moved.extend(application.rows("UPDATE item SET order_id = 7 WHERE order_id = 5 RETURNING id"))

    is_over = threading.Event()
    thread = threading.Thread(target=move)
    thread.start()
    try:
        result = run_sweep(sweep(batch=10), clock=CLOCK)
    finally:
        is_over.set()
        thread.join()

    assert (result.outcome, ids("account")) == ("done", {"account": [4]})
    assert len(moved) > 10
    assert result.counts["deleted_dependents"] == 6 + 12 + 300 - len(moved)
    assert application.rows("SELECT id FROM item WHERE order_id = 7 AND id NOT IN (13, 14) ORDER BY id") == sorted(
        moved
    )


def test_dependents_that_move_to_a_stale_parent_do_not_outlive_it(accounts: None, application: Application) -> None:
    def move() -> bool:
        return application.execute("UPDATE orders SET account_id = 2 WHERE id = 7")

    def check(result: Any) -> None:
        assert run_sweep(sweep(), clock=CLOCK).outcome == "done"
        assert ids("account", "orders") == {"account": [4], "orders": [8]}

    assert at_each_point(move, check) > 10


def test_parent_that_is_deleted_meanwhile_takes_its_dependents(accounts: None, application: Application) -> None:
    def delete() -> bool:
        return application.execute("DELETE FROM account WHERE id = 2")

    assert at_each_point(delete, lambda result: None) > 10
    assert ids() == LEFT


def test_key_of_a_parent_that_changes_is_followed_by_the_next_run(accounts: None, application: Application) -> None:
    for table in ("orders", "comment"):
        column = "account_id" if table == "orders" else "author_id"
        database.execute_sql(
            f"ALTER TABLE {table} DROP CONSTRAINT {table}_{column}_fkey, "
            f"ADD FOREIGN KEY ({column}) REFERENCES account ON UPDATE CASCADE ON DELETE CASCADE"
        )

    def change() -> bool:
        return application.execute("UPDATE account SET id = 20 WHERE id = 2")

    def check(result: Any) -> None:
        assert result.counts["failed"] == 0
        assert run_sweep(sweep(), clock=CLOCK).outcome == "done"
        assert ids("account", "orders", "item") == {each: LEFT[each] for each in ("account", "orders", "item")}

    assert at_each_point(change, check) > 10
