"""Parents that a run processes after all others: those that take long, and those with rejected dependents."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from housekeeping.testing.stubs import ManualClock
from tests.integration.cascades import shop
from tests.integration.cascades.shop import NOW, execute, ids, sweep, value
from tests.integration.conftest import Plant
from tests.integration.statements import watch_statements
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.ledger import NOW as DATABASE_NOW
from tests.internals.ledger import SILENCE, Run

CLOCK = ManualClock(NOW)
MINUTE = timedelta(minutes=1)


class Killed(BaseException):
    """End of a run at a commit."""


@pytest.fixture
def large(postgres: Database) -> None:
    """A closed account with 2,000 items, older than 20 others with one each."""
    shop.create()
    shop.fill(accounts=21, orders=1, items=1)
    execute("INSERT INTO item SELECT n, 21 FROM generate_series(1000, 2999) AS n")


class Run3s:
    """Run whose transactions take three seconds each of a minute, with what was left after each of them."""

    def __init__(self, *, killed_after: int | None = None) -> None:
        self.accounts: list[list[int]] = []
        self.items: list[int] = []
        clock = ManualClock(NOW)

        def tick(_: Any) -> None:
            clock.advance(timedelta(seconds=3))
            self.accounts.append([id for id in ids("account")["account"] if id <= 21])
            self.items.append(value("SELECT count(*) FROM item WHERE order_id = 21"))
            if len(self.items) == killed_after:
                raise Killed

        try:
            self.result = run_sweep(sweep(batch=10, runtime=MINUTE), clock=clock, on_batch=tick)
        except Killed:
            # Nothing of a killed process says how the run ended.
            Run.update(outcome=None, finished_at=None, heartbeat_at=DATABASE_NOW - 2 * SILENCE).execute()


def test_large_parent_is_last_in_the_next_run(large: None) -> None:
    first = Run3s()
    second = Run3s()

    assert (first.result.outcome, first.result.reason) == ("partial", "out_of_time")
    assert first.result.counts["details"]["postponed"] == {"rows": ["21"]}
    # A quarter of the first run's time was for the large one, before the others.
    assert 0 < 2001 - first.items[first.accounts.index([21])] < 100
    assert second.items[second.accounts.index([21])] == first.items[-1] > second.items[-1]


@pytest.mark.parametrize("killed_after", [7, 9, 12, 19])
def test_run_after_a_kill_continues_with_both(large: None, killed_after: int) -> None:
    killed = Run3s(killed_after=killed_after)
    following = Run3s()

    assert len(killed.items) == killed_after
    assert Run.get(Run.outcome == "lost").counts["details"]["postponed"] == {"rows": ["21"]}
    assert following.items[following.accounts.index([21])] == killed.items[-1] > following.items[-1]


def test_postponed_parent_is_forgotten_once_it_is_deleted(large: None) -> None:
    Run3s()
    result = run_sweep(sweep(batch=10), clock=CLOCK)

    assert (result.outcome, ids("account")) == ("done", {"account": [22]})
    assert result.counts["details"]["postponed"] == {"rows": []}


def test_blocked_parent_beside_a_postponed_one_keeps_its_dependents(large: None) -> None:
    Run3s()
    execute("CREATE TABLE invoice (order_id bigint REFERENCES orders); CREATE INDEX ON invoice (order_id)")
    execute("INSERT INTO account VALUES (1, '2026-04-20'), (2, '2026-04-21'); INSERT INTO orders VALUES (1, 1), (2, 2)")
    execute("INSERT INTO orders VALUES (3, 1); INSERT INTO item VALUES (1, 1), (3, 3); INSERT INTO invoice VALUES (1)")

    result = run_sweep(sweep({"invoice": "keep"}), clock=CLOCK)

    assert (result.outcome, result.counts["blocked"]) == ("done", 1)
    assert ids("account", "orders", "item") == {"account": [1, 22], "orders": [1, 3, 22], "item": [1, 3, 22]}


def test_two_large_parents_take_turns(large: None) -> None:
    execute("INSERT INTO item SELECT n, 20 FROM generate_series(3000, 4999) AS n")
    taken: list[int] = []
    for _ in range(6):
        before = value("SELECT count(*) FROM item WHERE order_id = 20")
        Run3s()
        taken.append(before - value("SELECT count(*) FROM item WHERE order_id = 20"))

    assert [each for each in ids("account")["account"] if each < 20] == []
    assert sum(taken) > 100


def test_parent_with_a_long_search_for_kept_rows_is_last(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page of ten items takes a second of a minute, the 2,000 items of the first parent take several."""
    execute(
        "CREATE TABLE invoice (id int PRIMARY KEY, item_id bigint REFERENCES item); CREATE INDEX ON invoice (item_id)"
    )
    monkeypatch.setattr("housekeeping.sweeps.cascade_walk.WINDOW", 10)
    clock = ManualClock(NOW)
    watch_statements(monkeypatch, lambda sql: clock.advance(timedelta(seconds=sql.startswith("FETCH"))))

    result = run_sweep(sweep({"invoice": "keep"}, batch=10, runtime=MINUTE), clock=clock)

    assert (result.outcome, result.reason) == ("partial", "out_of_time")
    assert ids("account") == {"account": [21, 22]}
    assert result.counts["details"]["postponed"] == {"rows": ["21"]}
    assert value("SELECT count(*) FROM item WHERE order_id = 21") == 2001


def test_search_for_kept_rows_that_a_stop_ends_begins_again(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop is withdrawn before the run has ended."""
    execute("CREATE TABLE invoice (item_id bigint REFERENCES item); CREATE INDEX ON invoice (item_id)")
    execute("INSERT INTO invoice VALUES (2999)")
    stopping, fetched, answers = threading.Event(), list[str](), iter([True])
    watch_statements(monkeypatch, lambda sql: fetched.append(sql) if sql.startswith("FETCH") else None)
    # True once, after the first page of the search.
    monkeypatch.setattr(stopping, "is_set", lambda: bool(fetched) and next(answers, False))

    result = run_sweep(sweep({"invoice": "keep"}, batch=10), clock=CLOCK, stopping=stopping)

    assert (result.outcome, result.counts["blocked"]) == ("done", 1)
    assert (ids("account"), value("SELECT count(*) FROM item WHERE order_id = 21")) == ({"account": [21, 22]}, 2001)


@pytest.fixture
def failing(accounts: None, plant: Plant) -> None:
    """The oldest closed account has an order whose items cannot be deleted."""
    execute("CREATE SEQUENCE tried; INSERT INTO orders VALUES (99, 3)")
    plant("DELETE ON item", "OLD.order_id = 99 AND nextval('tried') > 0", "RAISE 'no'")


def fill(items: int) -> None:
    execute(f"INSERT INTO item SELECT n, 99 FROM generate_series(1000, {999 + items}) AS n")


@pytest.mark.parametrize("items", [1, 99, 100, 101, 1000])
def test_rejected_dependents_keep_only_their_parent(failing: None, items: int) -> None:
    fill(items)

    result = run_sweep(sweep(batch=30), clock=CLOCK)

    assert (result.outcome, result.counts["failed"], result.counts["blocked"]) == ("done", min(items, 100), 1)
    assert result.counts["details"]["blocked"] == {
        "item": {"rows": 1, "since": NOW.isoformat(), "keys": {"3": NOW.isoformat()}}
    }
    assert result.counts["details"]["postponed"] == {"rows": ["3"]}
    assert ids("account") == {"account": [3, 4]}
    assert value("SELECT count(*) FROM item WHERE order_id = 99") == items


def test_rejected_dependents_are_tried_last_by_the_next_run(failing: None) -> None:
    fill(150)
    run_sweep(sweep(batch=30), clock=CLOCK)
    execute("INSERT INTO account VALUES (5, '2026-04-30'); INSERT INTO orders VALUES (100, 5)")
    tried: list[tuple[int, int]] = []

    def note(_: Any) -> None:
        tried.append((len(ids("account")["account"]), value("SELECT last_value FROM tried")))

    before = value("SELECT last_value FROM tried")
    result = run_sweep(sweep(batch=30), clock=CLOCK, on_batch=note)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 1, 100)
    assert (2, before) in tried


def test_parent_goes_once_its_dependents_can_be_deleted(failing: None) -> None:
    fill(150)
    run_sweep(sweep(), clock=CLOCK)
    execute("UPDATE item SET order_id = 6 WHERE order_id = 99; DELETE FROM orders WHERE id = 99")

    result = run_sweep(sweep(), clock=CLOCK)

    assert (result.outcome, result.counts["failed"], result.counts["blocked"]) == ("done", 0, 0)
    assert (ids("account"), result.counts["details"]["postponed"]) == ({"account": [4]}, {"rows": []})


@pytest.mark.slow
def test_run_leaves_1000_rejected_rows_in_a_row_and_the_next_one_does_the_others(accounts: None, plant: Plant) -> None:
    """Twelve accounts have 100 such items each, which a run meets before those of the others."""
    execute(
        "INSERT INTO account SELECT n, '2026-03-01 12:00Z' FROM generate_series(10, 21) AS n;"
        "INSERT INTO orders SELECT n, n FROM generate_series(10, 21) AS n;"
        "INSERT INTO item SELECT 1000 + n, 10 + n % 12 FROM generate_series(0, 1199) AS n"
    )
    plant("DELETE ON item", "OLD.order_id >= 10", "RAISE 'no'")

    first = run_sweep(sweep(batch=30), clock=CLOCK)
    second = run_sweep(sweep(batch=30), clock=CLOCK)

    assert (first.outcome, first.counts["failed"], first.counts["deleted_dependents"]) == ("failed", 1000, 0)
    assert first.reason is not None and "1,000 rows in a row failed" in first.reason
    # Of its own 1,000, the last ones are those of the first run.
    assert (second.outcome, second.counts["deleted_rows"]) == ("failed", 3)
    assert ids("account")["account"] == [4, *range(10, 22)]
