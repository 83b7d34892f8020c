"""Concurrent changes during a cascade, at each point between two of its statements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from peewee import fn

from housekeeping import Delete, Sweep
from housekeeping.testing.stubs import ManualClock
from tests.declarations import only
from tests.integration.archives.tickets import create_archives
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


@contextmanager
def once_it_has_begun(application: Application, statement: str, update: str) -> Iterator[list[Any]]:
    """Execute an UPDATE in another session once a statement of `waiting` has begun; yield the rows it returns.

    The statement has its snapshot then, and has locked no row.

    Parameters:
      statement: Text that it has.
    """
    database.execute_sql(
        "CREATE TABLE tried (); CREATE FUNCTION wait(held boolean) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN"
        f" IF current_query() LIKE '%%{statement}%%' OR current_query() LIKE '%%EXECUTE%%' THEN"
        "  PERFORM pg_advisory_xact_lock(7);"
        "  WHILE NOT EXISTS (SELECT FROM tried) LOOP PERFORM pg_sleep(0.001); END LOOP;"
        " END IF; RETURN held; END $$"
    )
    updated: list[Any] = []

    def execute() -> None:
        while not application.rows("SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 7"):
            if is_over.wait(0.001):
                return
        updated.extend(application.rows(update))
        application.execute("INSERT INTO tried DEFAULT VALUES")

    is_over = threading.Event()
    thread = threading.Thread(target=execute)
    thread.start()
    try:
        yield updated
    finally:
        is_over.set()
        thread.join()


def waiting(action: Delete) -> Sweep:
    """Return the sweep whose statements wait, with a function in the condition of its hold."""
    of = sweep(batch=10)
    return replace(of, stages=replace(only(of), action=action, hold=lambda row: fn.wait(row.on_hold)))


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
    # To the first order of the account that stays, from one of the account that was closed first.
    move = "UPDATE item SET order_id = 7 WHERE order_id = 5 RETURNING id"
    with once_it_has_begun(application, "housekeeping.batch", move) as moved:
        result = run_sweep(waiting(Delete(dependents=True)), clock=CLOCK)

    assert (result.outcome, ids("account")) == ("done", {"account": [4]})
    assert len(moved) > 10
    assert result.counts["deleted_dependents"] == 6 + 12 + 300 - len(moved)
    assert application.rows("SELECT id FROM item WHERE order_id = 7 AND id NOT IN (13, 14) ORDER BY id") == sorted(
        moved
    )


@pytest.mark.parametrize("partitioned", [False, True])
def test_archive_of_cleared_rows_has_what_was_written_to_them_during_a_batch(
    accounts: None, application: Application, archive: str, partitioned: bool
) -> None:
    database.execute_sql(
        "DROP TABLE comment; CREATE TABLE comment (id bigint PRIMARY KEY,"
        " author_id bigint REFERENCES account ON DELETE SET NULL, text text)"
        + (" PARTITION BY RANGE (id); CREATE TABLE comment_all PARTITION OF comment DEFAULT;" if partitioned else ";")
        + "CREATE INDEX ON comment (author_id);"
        "INSERT INTO comment SELECT n, 1 + mod(n, 3), 'old' FROM generate_series(1, 300) AS n"
    )
    of = waiting(Delete(dependents=True, archive_to=archive))
    create_archives(of)
    write = "UPDATE comment SET text = 'new' WHERE author_id = 3 RETURNING id"
    statement = "l1 AS MATERIALIZED%%FOR UPDATE" if partitioned else "housekeeping.batch"
    with once_it_has_begun(application, statement, write) as written:
        result = run_sweep(of, clock=CLOCK)

    assert len(written) > 10
    assert (result.outcome, ids("account")) == ("done", {"account": [4]})
    archived = application.rows(f"SELECT id FROM \"{archive}\".comment WHERE text = 'new' ORDER BY id")
    assert archived == sorted(written)


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
