"""Limits of a cascade: statements, transactions, time, and the rate that operators allow."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from typing import Any

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import Lease, Settings
from housekeeping.testing.stubs import ManualClock
from tests.integration.cascades import shop
from tests.integration.cascades.shop import NOW, execute, ids, sweep, value
from tests.integration.statements import watch_statements
from tests.internals.database import Database, database
from tests.internals.engine import run_sweep
from tests.internals.ledger import Override, operators


def _statements(run: Any) -> int:
    sent: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        watch_statements(patch, sent.append)
        run()
    return len(sent)


def test_statements_grow_with_rows_and_not_with_parents(postgres: Database) -> None:
    shop.create()

    def statements(accounts: int, orders: int, items: int) -> int:
        execute("TRUNCATE account, orders, item, comment")
        shop.fill(accounts, orders, items)
        return _statements(lambda: run_sweep(sweep(batch=100), clock=ManualClock(NOW)))

    few_parents = statements(accounts=10, orders=10, items=10)
    many_parents = statements(accounts=100, orders=1, items=10)
    ten_times = statements(accounts=100, orders=10, items=10)

    assert abs(many_parents - few_parents) < 15
    assert ten_times < 10 * few_parents


@pytest.mark.parametrize("orders", [1, 100])
def test_full_batch_of_dependents_is_one_round_trip(postgres: Database, orders: int) -> None:
    shop.create()

    def statements(items: int) -> int:
        execute("DELETE FROM comment")
        shop.fill(accounts=1, orders=orders, items=items // orders, open_accounts=0)
        return _statements(lambda: run_sweep(sweep(batch=100), clock=ManualClock(NOW)))

    few = statements(items=1000)

    # 90 more batches.
    assert statements(items=10_000) - few <= 92


def test_batches_of_uneven_dependents_are_counted_exactly(postgres: Database) -> None:
    # So many are expected that most batches are not as expected.
    shop.create()
    shop.fill(accounts=1, orders=60, items=1, open_accounts=0)
    execute("INSERT INTO item SELECT 100 + n, 1 + (n * n) % 60 FROM generate_series(1, 400) AS n")

    result = run_sweep(sweep(batch=10), clock=ManualClock(NOW))

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 1)
    assert result.counts["details"]["dependents"] == {
        "item": {"deleted": 460},
        "orders": {"deleted": 60},
        "comment": {"cleared": 1},
    }
    assert ids("account", "orders", "item") == {"account": [], "orders": [], "item": []}


def test_every_statement_uses_an_index(postgres: Database) -> None:
    shop.create()
    shop.fill(5, 5, 5)
    execute(
        "CREATE TABLE invoice (order_id bigint REFERENCES orders); CREATE INDEX ON invoice (order_id);"
        "CREATE TABLE part (id int PRIMARY KEY, item_id bigint REFERENCES item ON DELETE CASCADE,"
        " part_id int REFERENCES part ON DELETE CASCADE);"
        "CREATE INDEX ON part (item_id); CREATE INDEX ON part (part_id);"
        "INSERT INTO part SELECT n, n, nullif(n / 2, 0) FROM generate_series(1, 60) AS n"
    )
    plans: list[str] = []
    explained: set[str] = set()

    def explain_each(message: str) -> None:
        for each in message.split("; "):
            explain(each)

    def explain(sql: str) -> None:
        tables = re.findall(r"\b(?:FROM|JOIN|UPDATE) \"?(account|orders|item|comment|invoice|part)\b", sql)
        form = re.sub(r"'\{[^}]*\}'|\d+", "", sql)
        if (
            tables
            and not sql.startswith(("EXPLAIN", "DECLARE", "SET", "PREPARE"))
            and "::regclass" not in sql
            and form not in explained
        ):
            explained.add(form)
            cursor = database.connection().cursor()
            cursor.execute(
                "SET LOCAL enable_seqscan = off" if database.in_transaction() else "SET enable_seqscan = off"
            )
            cursor.execute(f"EXPLAIN {sql}")
            plans.append("\n".join([sql, *(line for (line,) in cursor.fetchall())]))

    with pytest.MonkeyPatch.context() as patch:
        watch_statements(patch, explain_each, with_values=True)
        result = run_sweep(sweep({"invoice": "keep"}), clock=ManualClock(NOW))

    assert result.outcome == "done"
    assert sum("DELETE FROM" in plan or "UPDATE comment" in plan for plan in plans) >= 5
    for plan in plans:
        assert "Seq Scan" not in plan, plan


def test_large_parent_is_continued_after_the_others(postgres: Database, caplog: pytest.LogCaptureFixture) -> None:
    """Each transaction takes three seconds of a minute: the first parent has 300 items, the others few."""
    shop.create()
    shop.fill(accounts=8, orders=1, items=1)
    execute("INSERT INTO item SELECT n, 8 FROM generate_series(100, 399) AS n")
    clock, gone = ManualClock(NOW), []

    def tick(_: Any) -> None:
        clock.advance(timedelta(seconds=3))
        gone.append((ids("account")["account"], value("SELECT count(*) FROM item WHERE order_id = 8")))

    result = run_sweep(sweep(batch=10, runtime=timedelta(minutes=1)), clock=clock, on_batch=tick)

    assert (result.outcome, result.reason) == ("partial", "out_of_time")
    assert gone[-1][0] == [8, 9]
    assert 0 < gone[-1][1] < 301 - 100
    assert [left for accounts, left in gone if accounts == [8, 9]][0] > 200
    for _ in range(3):
        result = run_sweep(sweep(batch=10, runtime=timedelta(minutes=1)), clock=clock, on_batch=tick)
    assert (result.outcome, ids("account")) == ("done", {"account": [9]})


def test_run_works_on_as_many_parents_as_a_batch_has_rows(postgres: Database) -> None:
    shop.create()
    shop.fill(accounts=10, orders=2, items=2, open_accounts=0)
    begun: list[int] = []

    def count(_: Any) -> None:
        rows = "SELECT count(*) FROM item JOIN orders ON orders.id = order_id WHERE account_id = account.id"
        begun.append(value(f"SELECT count(*) FROM account WHERE ({rows}) < 4"))

    run_sweep(sweep(), clock=ManualClock(NOW), on_batch=count)

    assert max(begun) == 3


def test_batches_of_dependents_grow(postgres: Database) -> None:
    shop.create()
    shop.fill(accounts=1, orders=1, items=1000, open_accounts=0)
    left: list[int] = []

    run_sweep(
        sweep(batch=10, batch_takes=timedelta(seconds=1)),
        clock=ManualClock(NOW),
        on_batch=lambda _: left.append(value("SELECT count(*) FROM item")),
    )

    sizes = [before - after for before, after in zip([1000, *left], left, strict=False) if before > after]
    # The comment was a batch of its own.
    assert (sizes[:4], max(sizes)) == ([20, 50, 100, 200], 200)


def test_throttle_looks_at_the_tables_of_dependents(accounts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    watch_statements(
        monkeypatch, lambda sql: asked.append(sql) if "pg_stat_replication" in sql else None, with_values=True
    )

    run_sweep(sweep(), clock=ManualClock(NOW))

    assert asked and all(each in asked[0] for each in ("account", "orders", "item", "comment"))


def test_narrowed_batches_have_fewer_rows(accounts: None) -> None:
    operators.switch(Override("shop.closed_accounts", "narrow", batch_size=1))
    sizes: list[int] = []
    before = 0

    def note(counts: Any) -> None:
        nonlocal before
        rows = sum(counts[each] for each in ("deleted_rows", "deleted_dependents", "cleared_dependents"))
        sizes.append(rows - before)
        before = rows

    result = run_sweep(sweep(), clock=ManualClock(NOW), on_batch=note)

    assert result.outcome == "done"
    assert max(sizes[1:]) == 1 and sum(sizes) == 24


def test_stopped_run_is_resumed_at_its_parents(accounts: None) -> None:
    stopping = threading.Event()
    first = run_sweep(sweep(), clock=ManualClock(NOW), stopping=stopping, on_batch=lambda _: stopping.set())

    assert (first.outcome, first.reason) == ("partial", "shutdown")
    second = run_sweep(sweep(), clock=ManualClock(NOW))

    assert second.outcome == "done"
    assert first.counts["deleted_dependents"] + second.counts["deleted_dependents"] == 18
    assert ids("account") == {"account": [4]}


def test_batch_of_an_earlier_lease_holder_changes_nothing(
    accounts: None, redis_client: redis.Redis, admin: Connection, settings: Settings
) -> None:
    """Another holder takes a token while a batch is committed."""
    seen: list[str] = []

    def take_over(sql: str) -> None:
        seen.extend([sql] if "DELETE FROM" in sql and "item" in sql else [])
        if len(seen) == 2 and sql == seen[-1]:
            with admin.cursor() as cursor:
                cursor.execute(f"UPDATE {settings.schema_name}.leases SET epoch = epoch + 1")

    of = sweep(lease=Lease("shop.closed_accounts", timedelta(minutes=10)))
    with pytest.MonkeyPatch.context() as patch:
        watch_statements(patch, take_over)
        result = run_sweep(of, clock=ManualClock(NOW))

    assert (result.outcome, result.counts["deleted_dependents"]) == ("lost_lease", 3)
    assert (len(ids("item")["item"]), ids("account")["account"]) == (13, [1, 2, 3, 4])
