"""Rows that a cascade leaves: parents of kept rows, rows on hold with their parents, locked rows, and bad ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from peewee import BigIntegerField

from housekeeping import BaseModel, Call, Delete, Event, Reference, Rows, Settings, Sweep, events
from housekeeping.testing.stubs import ManualClock
from tests.declarations import only
from tests.integration.cascades import shop
from tests.integration.cascades.shop import NOW, Application, depending_on, execute, ids, sweep
from tests.integration.conftest import Locked, Plant
from tests.integration.statements import watch_statements
from tests.internals.database import Database, database
from tests.internals.engine import run_sweep
from tests.internals.insight import plan
from tests.internals.ledger import Run
from tests.internals.workers import configured_sweeps

CLOCK = ManualClock(NOW)


def test_parent_with_a_kept_row_stays_with_all_that_depends_on_it(accounts: None) -> None:
    execute(
        "CREATE TABLE invoice (item_id bigint REFERENCES item); CREATE INDEX ON invoice (item_id);"
        "INSERT INTO invoice VALUES (6), (6), (99 - 86)"
    )

    result = run_sweep(sweep({"invoice": "keep"}), clock=CLOCK)

    assert result.outcome == "done"
    assert ids("account", "orders", "item") == {
        "account": [2, 4],
        "orders": [3, 4, 7, 8],
        "item": [5, 6, 7, 8, 13, 14, 15, 16],
    }
    assert (result.counts["blocked"], result.counts["deleted_rows"], result.counts["failed"]) == (1, 2, 0)
    assert result.counts["details"]["blocked"] == {
        "invoice": {"rows": 1, "since": NOW.isoformat(), "keys": {"2": NOW.isoformat()}}
    }


class Wanted(BaseModel):
    account_id = BigIntegerField(primary_key=True)


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"stale": lambda row: row.id.in_(Wanted.select(Wanted.account_id))}, [2, 3, 4]),
        ({"hold": lambda row: row.id.in_(Wanted.select(Wanted.account_id))}, [1, 4]),
    ],
    ids=["stale", "hold"],
)
def test_condition_with_a_query_decides_about_parents(accounts: None, given: dict[str, Any], left: list[int]) -> None:
    execute("CREATE TABLE wanted (account_id bigint PRIMARY KEY); INSERT INTO wanted VALUES (1)")
    declared = sweep()

    result = run_sweep(replace(declared, stages=replace(declared.stages, **given)), clock=CLOCK)

    assert (result.outcome, result.error) == ("done", None)
    assert ids("account")["account"] == left


def test_blocked_parent_keeps_the_time_of_its_first_run(accounts: None) -> None:
    execute("CREATE TABLE bill (id int, account_id bigint REFERENCES account); CREATE INDEX ON bill (account_id)")
    execute("INSERT INTO bill VALUES (1, 1)")
    run_sweep(sweep({"bill": "keep"}), clock=CLOCK)
    execute("INSERT INTO account VALUES (9, '2020-01-01'); INSERT INTO bill VALUES (2, 9)")
    later = NOW + timedelta(days=1)

    result = run_sweep(sweep({"bill": "keep"}), clock=ManualClock(later))

    assert result.counts["details"]["blocked"]["bill"]["keys"] == {"1": NOW.isoformat(), "9": later.isoformat()}
    assert Run.get_by_id(result.run_id).counts == result.counts


def test_blocked_parent_is_known_to_each_worker_by_itself(accounts: None) -> None:
    execute("CREATE TABLE bill (account_id bigint REFERENCES account); INSERT INTO bill VALUES (1)")
    run_sweep(sweep({"bill": "keep"}), clock=CLOCK)
    later = NOW + timedelta(days=1)

    result = run_sweep(replace(sweep({"bill": "keep"}), name="shop.others"), clock=ManualClock(later))

    assert result.counts["details"]["blocked"]["bill"]["keys"] == {"1": later.isoformat()}


def test_ledger_names_at_most_100_blocked_parents(accounts: None) -> None:
    execute("CREATE TABLE bill (account_id bigint REFERENCES account); CREATE INDEX ON bill (account_id)")
    execute("INSERT INTO account SELECT n, '2020-01-01' FROM generate_series(100, 249) AS n")
    execute("INSERT INTO bill SELECT id FROM account WHERE id >= 100")

    counts = run_sweep(sweep({"bill": "keep"}, batch=20), clock=CLOCK).counts

    assert (counts["blocked"], counts["details"]["blocked"]["bill"]["rows"]) == (150, 150)
    assert len(counts["details"]["blocked"]["bill"]["keys"]) == 100


def test_kept_row_that_comes_later_keeps_its_parent(accounts: None, application: Application) -> None:
    execute("CREATE TABLE invoice (order_id bigint REFERENCES orders); CREATE INDEX ON invoice (order_id)")

    def insert(_: Any) -> None:
        application.execute(
            "INSERT INTO invoice SELECT id FROM orders WHERE id = 1 AND NOT EXISTS (SELECT FROM invoice)"
        )

    result = run_sweep(sweep({"invoice": "keep"}), clock=CLOCK, on_batch=insert)

    assert (result.outcome, result.counts["failed"]) == ("done", 0)
    assert ids("account", "orders") == {"account": [1, 4], "orders": [1, 7, 8]}


def test_parent_that_becomes_fresh_keeps_what_is_left(accounts: None, application: Application) -> None:
    left: list[Any] = []

    def freshen(_: Any) -> None:
        if not left:
            application.execute("UPDATE account SET closed_at = NULL WHERE id = 2")
            left.extend(depending_on(application, 2))

    result = run_sweep(sweep(), clock=CLOCK, on_batch=freshen)

    assert (result.outcome, result.counts["deleted_rows"], len(left)) == ("done", 2, 7)
    assert depending_on(application, 2) == left


def test_parent_stays_while_the_application_adds_dependents_to_it(accounts: None, application: Application) -> None:
    execute("CREATE TABLE file (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, account_id bigint NOT NULL)")
    execute("CREATE INDEX ON file (account_id)")

    def add(_: Any) -> None:
        application.execute("INSERT INTO file (account_id) SELECT id FROM account WHERE id = 2")

    declared = sweep()
    action = Delete(dependents={"file": "delete"}, references=[Reference("file.account_id", "account.id")])
    of = replace(declared, stages=replace(only(declared), action=action))
    result = run_sweep(of, clock=CLOCK, on_batch=add)

    assert (result.outcome, result.counts["failed"], ids("account")) == ("done", 0, {"account": [2, 4]})
    assert run_sweep(of, clock=CLOCK).outcome == "done"
    assert ids("account", "file") == {"account": [4], "file": []}


def test_hold_of_another_sweep_keeps_a_dependent_and_what_it_depends_on(
    accounts: None, housekeeping_settings: Settings
) -> None:
    execute("UPDATE orders SET on_hold = true WHERE id = 3")
    old_orders = Sweep(
        "shop.old_orders",
        Rows("orders", stale=lambda row: row.id < 0, hold=lambda row: row.on_hold, action=Delete()),
    )
    known = configured_sweeps(housekeeping_settings, [sweep(), old_orders])

    result = run_sweep(known["shop.closed_accounts"], clock=CLOCK)

    assert (result.outcome, result.counts["failed"]) == ("done", 0)
    assert ids("account", "orders", "item") == {
        "account": [2, 4],
        "orders": [3, 7, 8],
        "item": [5, 6, 13, 14, 15, 16],
    }


def test_holds_of_further_sweeps_need_no_further_statements(
    accounts: None, housekeeping_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statements(others: int) -> int:
        rows = Rows("item", stale=lambda row: row.id < 0, hold=lambda row: row.id == 2, action=Delete())
        held = [Sweep(f"shop.held_{number}", rows) for number in range(others)]
        known = configured_sweeps(housekeeping_settings, [sweep(), *held])
        sent.clear()
        plan(known["shop.closed_accounts"], clock=CLOCK)
        return len(sent)

    sent: list[str] = []
    watch_statements(monkeypatch, sent.append)
    statements(1)  # reads the catalog

    assert statements(9) == statements(1)


@pytest.mark.parametrize("table", ["item", "comment"])
def test_hold_of_a_leaf_keeps_it_with_what_it_depends_on(
    accounts: None, housekeeping_settings: Settings, table: str
) -> None:
    held = Sweep("shop.held", Rows(table, stale=lambda row: row.id < 0, hold=lambda row: row.id == 2, action=Delete()))
    known = configured_sweeps(housekeeping_settings, [sweep(), held])

    result = run_sweep(known["shop.closed_accounts"], clock=CLOCK)

    kept = {"item": {"account": [1, 4], "orders": [1, 7, 8], "item": [2, 13, 14, 15, 16]}}
    assert (result.outcome, result.counts["failed"]) == ("done", 0)
    assert ids("account", "orders", "item") == kept.get(
        table, {"account": [2, 4], "orders": [7, 8], "item": [13, 14, 15, 16]}
    )
    assert database.execute_sql("SELECT author_id FROM comment WHERE id = 2").fetchone() == (
        (2,) if table == "comment" else (None,)
    )


def test_own_hold_keeps_a_row_that_depends_on_another_one(accounts: None) -> None:
    execute("ALTER TABLE account ADD parent_id bigint REFERENCES account; CREATE INDEX ON account (parent_id)")
    execute("INSERT INTO account VALUES (10, NULL, true, 1), (11, NULL, false, 10), (12, NULL, false, 1)")

    run_sweep(sweep({"account": "delete"}), clock=CLOCK)

    assert ids("account") == {"account": [1, 4, 10, 11]}


@pytest.mark.parametrize(
    ("query", "left"),
    [
        ("SELECT FROM account WHERE id = 2 FOR UPDATE", {"account": [2, 4], "orders": [3, 4, 7, 8]}),
        ("SELECT FROM account WHERE id = 2 FOR KEY SHARE", {"account": [2, 4], "orders": [7, 8]}),
        ("SELECT FROM orders WHERE id = 3 FOR UPDATE", {"account": [2, 4], "orders": [3, 7, 8]}),
        ("SELECT FROM item WHERE id = 5 FOR SHARE", {"account": [2, 4], "orders": [3, 7, 8]}),
        ("INSERT INTO item VALUES (99, 3)", {"account": [2, 4], "orders": [3, 7, 8]}),
        ("SELECT FROM comment WHERE id = 2 FOR UPDATE", {"account": [2, 4], "orders": [7, 8]}),
    ],
)
def test_locked_rows_are_left(accounts: None, locked: Locked, query: str, left: dict[str, list[int]]) -> None:
    with locked(query):
        result = run_sweep(sweep(), clock=CLOCK)

    assert (result.outcome, result.counts["failed"], ids(*left)) == ("done", 0, left)
    assert run_sweep(sweep(), clock=CLOCK).counts["deleted_rows"] == 1
    assert ids("account") == {"account": [4]}


def test_locked_row_does_not_hold_up_full_batches(postgres: Database, locked: Locked) -> None:
    shop.create()
    shop.fill(accounts=3, orders=20, items=5, open_accounts=0)

    with locked("SELECT FROM item WHERE id = 150 FOR UPDATE"):
        result = run_sweep(sweep(batch=10), clock=CLOCK)

    assert (result.outcome, result.counts["deleted_dependents"]) == ("done", 3 * 20 + 3 * 20 * 5 - 2)
    assert ids("account", "orders", "item") == {"account": [2], "orders": [30], "item": [150]}


def test_bad_dependent_fails_alone(accounts: None, plant: Plant, reported: list[dict[str, Any]]) -> None:
    plant("DELETE ON item", "OLD.id = 6", "RAISE 'no'")

    result = run_sweep(sweep(), clock=CLOCK)

    assert (result.outcome, result.counts["failed"]) == ("done", 1)
    assert ids("account", "orders", "item") == {
        "account": [2, 4],
        "orders": [3, 7, 8],
        "item": [6, 13, 14, 15, 16],
    }
    (report,) = reported
    assert (report["table"], report["id"]) == ("item", 6)


def test_row_that_a_trigger_keeps_fails_alone(accounts: None, plant: Plant) -> None:
    plant("DELETE ON orders", "OLD.id = 3", "RETURN NULL")
    plant("DELETE ON item", "OLD.id = 1", "RETURN NULL")

    result = run_sweep(sweep(), clock=CLOCK)

    assert (result.outcome, result.counts["failed"]) == ("done", 2)
    assert ids("account", "orders", "item") == {
        "account": [1, 2, 4],
        "orders": [1, 3, 7, 8],
        "item": [1, 13, 14, 15, 16],
    }


@pytest.mark.parametrize("comments", [1, 3, 40])
def test_column_that_a_trigger_restores_blocks_its_parent(
    accounts: None, plant: Plant, monkeypatch: pytest.MonkeyPatch, comments: int
) -> None:
    monkeypatch.setattr("housekeeping.sweeps.cascade_walk.WINDOW", 10)
    execute(f"INSERT INTO comment SELECT n, 2 FROM generate_series(11, {9 + comments}) AS n")
    plant("UPDATE ON comment", "OLD.author_id = 2", "NEW.author_id = 2")

    result = run_sweep(sweep(), clock=CLOCK)

    assert (result.outcome, result.counts["failed"], result.counts["blocked"]) == ("done", comments, 1)
    assert (result.counts["cleared_dependents"], ids("account")) == (2, {"account": [2, 4]})
    assert result.counts["details"]["blocked"]["comment"]["keys"] == {"2": NOW.isoformat()}


@pytest.mark.parametrize("comments", [1, 40])
def test_column_that_a_trigger_gives_another_parent_is_cleared(accounts: None, plant: Plant, comments: int) -> None:
    execute(f"INSERT INTO comment SELECT n, 2 FROM generate_series(11, {9 + comments}) AS n")
    plant("UPDATE ON comment", "NEW.author_id IS NULL", "NEW.author_id = 4")

    result = run_sweep(sweep(), clock=CLOCK)

    assert (result.outcome, result.counts["failed"], ids("account")) == ("done", 0, {"account": [4]})
    assert result.counts["cleared_dependents"] == 2 + comments


def test_event_of_a_parent_follows_its_own_commit(accounts: None) -> None:
    closed, seen = events.event("shop.account_deleted"), []

    def note(sender: Any, *, rows: Sequence[dict[str, Any]], **about: Any) -> None:
        seen.append(([row["account"] for row in rows], ids("account")["account"]))

    declared = sweep()
    stages = replace(only(declared), event=Event(closed, account="id"))
    with closed.connected_to(note):
        run_sweep(replace(declared, stages=stages), clock=CLOCK)

    assert seen == [([3, 2, 1], [4])]


def test_function_is_called_once_for_each_parent_before_its_dependents_go(accounts: None) -> None:
    calls = []

    def call(account: Any) -> None:
        calls.append((account.id, len(ids("item")["item"])))
        if account.id == 2:
            raise ValueError("not this one")

    declared = sweep()
    stages = replace(only(declared), action=Call(call, then=Delete(dependents=True)))
    result = run_sweep(replace(declared, stages=stages), clock=CLOCK)

    assert calls == [(3, 16), (2, 16), (1, 16)]
    assert (result.outcome, result.counts["failed"], result.counts["deleted_rows"]) == ("done", 1, 2)
    assert ids("account", "orders") == {"account": [2, 4], "orders": [3, 4, 7, 8]}


def test_function_is_not_called_for_a_blocked_parent(accounts: None) -> None:
    execute("CREATE TABLE bill (account_id bigint REFERENCES account); INSERT INTO bill VALUES (2)")
    calls: list[int] = []
    declared = sweep()
    action = Call(lambda account: calls.append(account.id), then=Delete(dependents={"bill": "keep"}))

    run_sweep(replace(declared, stages=replace(only(declared), action=action)), clock=CLOCK)

    assert (calls, ids("account")) == ([3, 1], {"account": [2, 4]})


def test_undecided_link_fails_the_run_before_anything_changes(accounts: None) -> None:
    execute("CREATE TABLE bill (account_id bigint REFERENCES account)")

    result = run_sweep(sweep(), clock=CLOCK)

    assert (result.outcome, len(ids("item")["item"])) == ("failed", 16)
    assert result.reason is not None and 'dependents={"bill.account_id": "keep"}' in result.reason


def test_max_rows_counts_the_rows_of_all_tables(accounts: None) -> None:
    result = run_sweep(sweep(), clock=CLOCK, max_rows=7)

    assert (result.outcome, result.reason) == ("partial", "limit")
    assert sum(result.counts[each] for each in ("deleted_rows", "deleted_dependents", "cleared_dependents")) == 7
    assert database.execute_sql("SELECT count(*) FROM account").fetchone() == (4,)
