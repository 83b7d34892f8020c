"""The tree of dependents in plans: how many rows each link reaches, by which index, in how many transactions."""

from __future__ import annotations

from typing import Any

import pytest
from peewee import BigAutoField

from housekeeping import BaseModel, Delete, Limits, Reference, Rows, Sweep, UtcDateTimeField
from tests.integration.conftest import Do
from tests.internals.insight import as_json, plan
from tests.internals.sweeps import tree


class Account(BaseModel):
    id = BigAutoField()
    closed_at = UtcDateTimeField()


def sweep_with(action: Delete, batch: int = 100) -> Sweep:
    rows = Rows(Account, stale=lambda row, now: row.closed_at < now, order="closed_at", action=action)
    return Sweep("shop.closed_accounts", rows, limits=Limits(batch))


@pytest.fixture
def do(do: Do) -> Do:
    do(
        "CREATE TABLE account (id bigint PRIMARY KEY, closed_at timestamptz NOT NULL);"
        "INSERT INTO account SELECT n, '2026-01-01' FROM generate_series(1, 5) AS n;"
        "INSERT INTO account SELECT n, now() + interval '1 day' FROM generate_series(6, 9) AS n"
    )
    return do


ORDERS = """
CREATE TABLE orders (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id) ON DELETE CASCADE);
CREATE TABLE order_item (id bigint PRIMARY KEY, order_id bigint NOT NULL REFERENCES orders (id) ON DELETE CASCADE);
CREATE INDEX ON orders (account_id); CREATE INDEX ON order_item (order_id);
INSERT INTO orders SELECT n, n % 9 + 1 FROM generate_series(1, 90) AS n;
INSERT INTO order_item SELECT n, n % 90 + 1 FROM generate_series(1, 900) AS n;
"""


def rows_of(action: Delete, batch: int = 100) -> dict[str, tuple[Any, bool, Any]]:
    planned = as_json(plan(sweep_with(action, batch)))["dependents"]
    return {each["name"]: (each["rows"], each["exact"], each["batches"]) for each in planned}


def test_dependents_of_stale_rows_are_counted_at_every_depth(do: Do) -> None:
    do(ORDERS)

    assert rows_of(Delete(dependents=True), batch=40) == {
        "orders.account_id": (50, True, 2),
        "order_item.order_id": (500, True, 13),
    }


def test_plain_delete_has_the_same_tree_without_transactions_of_its_own(do: Do) -> None:
    do(ORDERS)

    assert rows_of(Delete()) == {"orders.account_id": (50, True, 0), "order_item.order_id": (500, True, 0)}


def test_trees_circles_and_references_are_counted_once_for_each_row(do: Do) -> None:
    do(
        "CREATE TABLE folder (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id) ON DELETE CASCADE,"
        " parent_id bigint REFERENCES folder (id) ON DELETE CASCADE);"
        "CREATE TABLE file (id bigint PRIMARY KEY, folder_id bigint REFERENCES folder (id) ON DELETE CASCADE);"
        "ALTER TABLE folder ADD COLUMN cover_id bigint REFERENCES file (id) ON DELETE CASCADE;"
        "CREATE TABLE note (id bigint PRIMARY KEY, kind text, at bigint);"
        "CREATE INDEX ON folder (account_id); CREATE INDEX ON folder (parent_id); CREATE INDEX ON folder (cover_id);"
        "CREATE INDEX ON file (folder_id); CREATE INDEX ON note (at);"
        "INSERT INTO folder VALUES (1, 1, NULL), (2, NULL, 1), (3, NULL, 2), (4, 7, NULL), (5, NULL, 4);"
        "INSERT INTO file VALUES (10, 3), (11, 3), (12, 5); UPDATE folder SET cover_id = 10 WHERE id = 2;"
        "INSERT INTO note VALUES (1, '50%', 10), (2, 'x', 10), (3, '50%', 12)"
    )
    note = Reference("note.at", "file.id", where="kind = '50%'")

    assert rows_of(Delete(dependents={"note": "keep"}, references=[note])) == {
        "folder.account_id": (1, True, 1),
        "folder.parent_id": (2, True, 1),
        "folder.cover_id": (1, True, 1),
        "file.folder_id": (2, True, 1),
        "note.at": (1, True, 0),
    }


def test_composite_keys_and_partitions_are_counted(do: Do) -> None:
    do(
        "CREATE TABLE entry (id bigint, day date, account_id bigint REFERENCES account (id) ON DELETE CASCADE,"
        " PRIMARY KEY (id, day)) PARTITION BY RANGE (day);"
        "CREATE TABLE entry_1 PARTITION OF entry FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');"
        "CREATE TABLE entry_2 PARTITION OF entry DEFAULT; CREATE INDEX ON entry (account_id);"
        "CREATE TABLE note (id bigint PRIMARY KEY, entry_id bigint, day date,"
        " FOREIGN KEY (entry_id, day) REFERENCES entry (id, day) ON DELETE SET NULL);"
        "CREATE INDEX ON note (entry_id, day);"
        "INSERT INTO entry VALUES (1, '2020-05-05', 1), (1, '2023-05-05', 1), (2, '2020-05-05', 9);"
        "INSERT INTO note VALUES (1, 1, '2020-05-05'), (2, 1, '2023-05-05'), (3, 2, '2020-05-05')"
    )

    assert rows_of(Delete(dependents=True)) == {
        "entry.account_id": (2, True, 1),
        "note.entry_id,day": (2, True, 1),
    }


def test_many_dependents_are_estimated_from_those_of_the_first_rows(do: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    do(ORDERS)
    monkeypatch.setattr(tree, "COUNTED", 120)
    monkeypatch.setattr(tree, "SAMPLE", 1)

    assert rows_of(Delete(dependents=True)) == {
        "orders.account_id": (50, False, 1),
        "order_item.order_id": (500, False, 5),
    }


def test_one_row_with_too_many_dependents_is_estimated_by_the_sizes_of_tables(
    do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(ORDERS)
    do("DELETE FROM account WHERE id = -1; UPDATE account SET closed_at = now() + interval '1 day' WHERE id > 1")
    do("ANALYZE account, orders, order_item")
    monkeypatch.setattr(tree, "COUNTED", 50)

    found = rows_of(Delete(dependents=True))

    assert found["orders.account_id"] == (10, False, 1)
    assert found["order_item.order_id"] == (100, False, 1)


def test_missing_index_of_a_large_table_is_named_and_its_rows_are_not_counted(do: Do) -> None:
    do(ORDERS)
    do("DROP INDEX order_item_order_id_idx; INSERT INTO order_item SELECT n, 1 FROM generate_series(901, 30000) AS n")

    planned = {each["name"]: each for each in as_json(plan(sweep_with(Delete(dependents=True))))["dependents"]}

    item = planned["order_item.order_id"]
    assert (item["indexed"], item["large"], item["exact"]) == (False, True, False)
    assert item["way_out"] == "CREATE INDEX CONCURRENTLY ON order_item (order_id)"
    assert (planned["orders.account_id"]["rows"], planned["orders.account_id"]["exact"]) == (50, True)


def test_rows_that_a_kept_dependent_keeps_are_sampled(do: Do) -> None:
    do(ORDERS)
    do("DELETE FROM order_item WHERE order_id <> 1")

    planned = {each.link.name: each for each in plan(sweep_with(Delete(dependents={"order_item": "keep"}))).dependents}

    assert planned["order_item.order_id"].text == (
        "order_item (order_id) references orders, ON DELETE CASCADE, indexed: 1 of the first 5 stale rows is "
        "referenced and stays; account <- orders (delete) <- order_item (keep)"
    )
