"""Cascades through trees, circles, composite keys, several links between two tables, and references by condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from housekeeping import Delete, Guard, Limits, Reference, Rows, RunResult, Sweep
from housekeeping.testing.stubs import ManualClock
from tests.integration.cascades.shop import NOW, execute, ids, value
from tests.integration.statements import watch_statements
from tests.internals.database import Database, database
from tests.internals.engine import run_sweep

CLOCK = ManualClock(NOW)


def run(table: str, where: Callable[[Any], Any], dependents: Any = True, batch: int = 3, **options: Any) -> RunResult:
    """Run a sweep of the rows of a table that match, with their dependents, to its end."""
    rows = Rows(table, stale=where, action=Delete(dependents=dependents, **options))
    result = run_sweep(
        Sweep("shop.test", rows, limits=Limits(batch=batch, batch_takes=None), guard=Guard(first_run=False)),
        clock=CLOCK,
    )
    assert result.outcome == "done", result
    return result


def by_table(result: RunResult) -> Any:
    return result.counts["details"]["dependents"]


def test_tree_of_any_depth_takes_as_many_transactions_as_its_rows_need(postgres: Database) -> None:
    """A chain of 100 comments, each a reply to the one before."""
    execute(
        "CREATE TABLE reply (id int PRIMARY KEY, parent_id int REFERENCES reply);"
        "CREATE INDEX ON reply (parent_id);"
        "INSERT INTO reply SELECT n, nullif(n - 1, 0) FROM generate_series(1, 100) AS n"
    )

    result = run("reply", lambda row: row.id == 20, {"reply": "delete"}, batch=10)

    assert ids("reply") == {"reply": list(range(1, 20))}
    assert (result.counts["deleted_rows"], by_table(result)) == (1, {"reply": {"deleted": 80}})
    assert result.counts["batches"] == 9


@pytest.mark.slow
def test_kept_row_is_found_below_a_tree_deeper_than_the_stack(postgres: Database) -> None:
    execute(
        "CREATE TABLE reply (id int PRIMARY KEY, parent_id int REFERENCES reply);"
        "CREATE TABLE note (reply_id int REFERENCES reply);"
        "CREATE INDEX ON reply (parent_id); CREATE INDEX ON note (reply_id);"
        "INSERT INTO reply SELECT n, nullif(n - 1, 0) FROM generate_series(1, 1500) AS n;"
        "INSERT INTO note VALUES (1500)"
    )

    result = run("reply", lambda row: row.id == 20, {"reply": "delete", "note": "keep"})

    assert (result.counts["deleted_rows"], result.counts["blocked"]) == (0, 1)
    assert value("SELECT count(*) FROM reply") == 1500


@pytest.mark.parametrize("window", [1, 2, 3, 7])
def test_tree_is_deleted_whatever_fits_into_a_window(
    postgres: Database, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr("housekeeping.sweeps.cascade_walk.WINDOW", window)
    execute(
        "CREATE TABLE node (id int PRIMARY KEY, parent_id int REFERENCES node ON DELETE RESTRICT);"
        "CREATE TABLE leaf (id int PRIMARY KEY, node_id int NOT NULL REFERENCES node);"
        "CREATE INDEX ON node (parent_id); CREATE INDEX ON leaf (node_id);"
        "INSERT INTO node SELECT n, nullif(n / 3, 0) FROM generate_series(1, 60) AS n;"
        "INSERT INTO leaf SELECT n, 1 + n % 60 FROM generate_series(1, 100) AS n"
    )

    result = run("node", lambda row: row.id == 1, {"node": "delete", "leaf": "delete"})

    hanging = {1}
    while more := {n for n in range(1, 61) if n // 3 in hanging} - hanging:
        hanging |= more
    assert ids("node") == {"node": [n for n in range(1, 61) if n not in hanging]}
    assert value("SELECT count(*) FROM leaf") == 100 - by_table(result)["leaf"]["deleted"]
    assert by_table(result)["node"]["deleted"] == len(hanging) - 1


def test_parents_that_depend_on_each_other_go_together(postgres: Database) -> None:
    execute(
        "CREATE TABLE person (id int PRIMARY KEY, boss_id int REFERENCES person ON DELETE RESTRICT, old boolean);"
        "CREATE INDEX ON person (boss_id);"
        "INSERT INTO person VALUES (1, NULL, true), (2, 1, true), (3, 2, false), (4, 4, true), (5, NULL, false);"
        "INSERT INTO person VALUES (6, NULL, true), (7, 6, false); UPDATE person SET boss_id = 7 WHERE id = 6"
    )

    result = run("person", lambda row: row.old, {"person": "delete"}, batch=10)

    assert ids("person") == {"person": [5]}
    assert (result.counts["deleted_rows"], by_table(result)) == (4, {"person": {"deleted": 2}})


def test_rows_beside_a_circle_go_in_the_same_run(postgres: Database) -> None:
    """Rows 1, 2 and 3 are a circle. A batch has dependents of row 3, and of row 10, which goes later."""
    execute(
        "CREATE TABLE account (id int PRIMARY KEY, old boolean); INSERT INTO account VALUES (1, true);"
        "CREATE TABLE node (id int PRIMARY KEY, account int REFERENCES account ON DELETE CASCADE,"
        " node int REFERENCES node ON DELETE CASCADE);"
        "CREATE INDEX ON node (account); CREATE INDEX ON node (node);"
        "INSERT INTO node VALUES (1, 1, 3), (2, NULL, 1), (10, NULL, 2), (11, NULL, 2), (3, NULL, 2),"
        " (20, NULL, 10), (21, NULL, 3)"
    )

    result = run("account", lambda row: row.old)

    assert ids("account", "node") == {"account": [], "node": []}
    assert by_table(result) == {"node": {"deleted": 7}}


def test_circle_of_tables(postgres: Database) -> None:
    """Each account has a main address, which belongs to the account; the second one's to the first account."""
    execute(
        "CREATE TABLE account (id int PRIMARY KEY, address_id int);"
        "CREATE TABLE address (id int PRIMARY KEY, account_id int NOT NULL REFERENCES account ON DELETE CASCADE);"
        "CREATE TABLE stamp (id int PRIMARY KEY, address_id int NOT NULL REFERENCES address ON DELETE CASCADE);"
        "ALTER TABLE account ADD FOREIGN KEY (address_id) REFERENCES address;"
        "CREATE INDEX ON account (address_id); CREATE INDEX ON address (account_id);"
        "CREATE INDEX ON stamp (address_id);"
        "INSERT INTO account VALUES (1), (2), (3);"
        "INSERT INTO address SELECT n, 1 + n % 3 FROM generate_series(1, 6) AS n;"
        "INSERT INTO stamp SELECT n, n FROM generate_series(1, 6) AS n;"
        "UPDATE account SET address_id = CASE id WHEN 1 THEN 3 WHEN 2 THEN 3 ELSE 2 END"
    )

    result = run("account", lambda row: row.id == 1, {"account": "delete"})

    assert ids("account", "address", "stamp") == {"account": [3], "address": [2, 5], "stamp": [2, 5]}
    assert by_table(result) == {
        "account": {"deleted": 1},
        "address": {"deleted": 4},
        "stamp": {"deleted": 4},
    }


def test_circle_is_broken_by_a_link_that_is_cleared(postgres: Database) -> None:
    execute(
        "CREATE TABLE account (id int PRIMARY KEY, address_id int);"
        "CREATE TABLE address (id int PRIMARY KEY, account_id int NOT NULL REFERENCES account ON DELETE CASCADE);"
        "ALTER TABLE account ADD FOREIGN KEY (address_id) REFERENCES address ON DELETE SET NULL;"
        "CREATE INDEX ON account (address_id); CREATE INDEX ON address (account_id);"
        "INSERT INTO account VALUES (1), (2); INSERT INTO address VALUES (1, 1), (2, 2);"
        "UPDATE account SET address_id = id"
    )

    result = run("account", lambda row: row.id == 1)

    assert ids("account", "address") == {"account": [2], "address": [2]}
    assert by_table(result) == {"account": {"cleared": 1}, "address": {"deleted": 1}}


@pytest.mark.parametrize("kind", ["text", "uuid", "numeric(20, 3)", "bytea", "char(40)", "timestamptz"])
def test_keys_of_other_types(postgres: Database, kind: str) -> None:
    key = {
        "text": "'a \"b\" \\ %s {c}, ' || n",
        "uuid": "md5(n::text)::uuid",
        "bytea": "decode(md5(n::text), 'hex')",
        "timestamptz": "CASE n WHEN 1 THEN 'infinity' ELSE '2026-01-01'::timestamptz + n * interval '1 us' END",
        "char(40)": "'x' || n",
    }.get(kind, "n + 0.125")
    execute(
        f"CREATE TABLE one (key {kind} PRIMARY KEY, old boolean NOT NULL);"
        f'CREATE TABLE "Two" (key {kind} PRIMARY KEY, "one of" {kind} NOT NULL REFERENCES one ON DELETE CASCADE);'
        f'CREATE TABLE three (id int PRIMARY KEY, two {kind} NOT NULL REFERENCES "Two" ON DELETE CASCADE);'
        'CREATE INDEX ON "Two" ("one of"); CREATE INDEX ON three (two);'
        f"INSERT INTO one SELECT {key}, n <= 2 FROM generate_series(1, 3) AS n;"
        'INSERT INTO "Two" SELECT key, key FROM one;'
        'INSERT INTO three SELECT row_number() OVER (ORDER BY key DESC), key FROM "Two"'
    )

    result = run("one", lambda row: row.old)

    assert by_table(result) == {'"Two"': {"deleted": 2}, "three": {"deleted": 2}}
    assert value("SELECT count(*) FROM one") == 1


def test_composite_keys_and_links_to_another_unique_key(postgres: Database) -> None:
    execute(
        "CREATE TABLE tenant (id int PRIMARY KEY, code text UNIQUE, old boolean);"
        "CREATE TABLE member (tenant text REFERENCES tenant (code) ON DELETE CASCADE, number int,"
        " PRIMARY KEY (tenant, number));"
        "CREATE TABLE note (tenant text NOT NULL, number int, place int, author text,"
        " PRIMARY KEY (place, tenant), FOREIGN KEY (tenant, number) REFERENCES member ON DELETE SET NULL (number),"
        " FOREIGN KEY (author) REFERENCES tenant (code) ON DELETE SET DEFAULT);"
        "CREATE INDEX ON note (tenant, number); CREATE INDEX ON note (author);"
        "INSERT INTO tenant VALUES (1, 'a', true), (2, 'b', false), (3, NULL, true);"
        "INSERT INTO member SELECT code, n FROM tenant, generate_series(1, 5) AS n WHERE code IS NOT NULL;"
        "INSERT INTO note SELECT tenant, number, number, tenant FROM member"
    )

    result = run("tenant", lambda row: row.old)

    assert result.counts["deleted_rows"] == 2
    assert by_table(result) == {"member": {"deleted": 5}, "note": {"cleared": 10}}
    assert value("SELECT count(*) FROM member") == 5
    assert value("SELECT count(*) FROM note WHERE tenant = 'a' AND number IS NULL AND author IS NULL") == 5
    assert value("SELECT count(*) FROM note WHERE tenant = 'b' AND number > 0 AND author = 'b'") == 5


DEFAULTS = """
CREATE DOMAIN author AS bigint DEFAULT 1;
CREATE TABLE account (id bigint PRIMARY KEY, old boolean); INSERT INTO account VALUES (1, true), (2, true), (3, false);
CREATE TABLE note (id int PRIMARY KEY, author {type} REFERENCES account ON DELETE SET DEFAULT);
CREATE INDEX ON note (author); INSERT INTO note SELECT n, 1 + n % 2 FROM generate_series(1, {rows}) AS n
"""


@pytest.mark.parametrize("kind", ["bigint DEFAULT 1", "author"])
def test_row_that_refers_to_a_stale_parent_by_its_default_keeps_it(postgres: Database, kind: str) -> None:
    execute(DEFAULTS.format(type=kind, rows=10))

    result = run("account", lambda row: row.old)

    assert (ids("account"), by_table(result)) == ({"account": [1, 3]}, {"note": {"cleared": 5}})
    assert value("SELECT count(*) FROM note WHERE author = 1") == 10


def test_statements_do_not_grow_with_the_rows_that_got_a_default(
    postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(DEFAULTS.format(type="bigint DEFAULT 3", rows=2000))
    monkeypatch.setattr("housekeeping.sweeps.cascade_walk.WINDOW", 10)
    sizes: list[int] = []
    watch_statements(monkeypatch, lambda sql: sizes.append(len(sql)), with_values=True)

    run("account", lambda row: row.old)

    assert value("SELECT count(*) FROM note WHERE author = 3") == 2000
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2])


def test_several_links_between_two_tables(postgres: Database) -> None:
    execute(
        "CREATE TABLE person (id int PRIMARY KEY);"
        "CREATE TABLE message (id int PRIMARY KEY, sender int REFERENCES person ON DELETE CASCADE,"
        " receiver int REFERENCES person ON DELETE SET NULL, auditor int REFERENCES person);"
        "CREATE INDEX ON message (sender); CREATE INDEX ON message (receiver); CREATE INDEX ON message (auditor);"
        "INSERT INTO person SELECT generate_series(1, 4);"
        "INSERT INTO message VALUES (1, 1, 1, NULL), (2, 1, 2, NULL), (3, 2, 1, NULL), (4, 3, 3, 2), (5, 2, 2, NULL)"
    )

    result = run("person", lambda row: row.id <= 2, {"message.auditor": "keep"})

    assert ids("person", "message") == {"person": [2, 3, 4], "message": [3, 4, 5]}
    assert database.execute_sql("SELECT receiver FROM message ORDER BY id").fetchall() == [(None,), (3,), (2,)]
    assert result.counts["blocked"] == 1


def test_polymorphic_reference(postgres: Database) -> None:
    execute(
        "CREATE TABLE account (id int PRIMARY KEY);"
        "CREATE TABLE attachment (id int PRIMARY KEY, owner_type text, owner_id bigint);"
        "CREATE INDEX ON attachment (owner_id) WHERE owner_type = 'Account';"
        "INSERT INTO account VALUES (1), (2);"
        "INSERT INTO attachment SELECT n, CASE WHEN n < 6 THEN 'Account' ELSE '100%' END, 1 + n % 2 "
        "FROM generate_series(1, 10) AS n"
    )

    result = run(
        "account",
        lambda row: row.id == 1,
        {"attachment": "delete"},
        references=[Reference("attachment.owner_id", "account.id", where="attachment.owner_type NOT LIKE '%\\%'")],
    )

    assert by_table(result) == {"attachment": {"deleted": 2}}
    assert ids("account", "attachment") == {"account": [2], "attachment": [1, 3, 5, 6, 7, 8, 9, 10]}


def test_partitioned_dependents(postgres: Database) -> None:
    execute(
        "CREATE TABLE account (id int PRIMARY KEY);"
        "CREATE TABLE visit (id int, day int, account_id int NOT NULL REFERENCES account ON DELETE CASCADE,"
        " PRIMARY KEY (id, day)) PARTITION BY LIST (day);"
        "CREATE TABLE visit_1 PARTITION OF visit FOR VALUES IN (1); CREATE TABLE visit_2 PARTITION OF visit DEFAULT;"
        "CREATE TABLE click (id int PRIMARY KEY, visit int, day int,"
        " FOREIGN KEY (visit, day) REFERENCES visit ON DELETE CASCADE);"
        "CREATE INDEX ON visit (account_id); CREATE INDEX ON click (visit, day);"
        "INSERT INTO account VALUES (1), (2);"
        "INSERT INTO visit SELECT n, 1 + n % 3, 1 + n % 2 FROM generate_series(1, 12) AS n;"
        "INSERT INTO click SELECT id, id, day FROM visit"
    )

    result = run("account", lambda row: row.id == 1)

    assert by_table(result) == {"visit": {"deleted": 6}, "click": {"deleted": 6}}
    assert value("SELECT count(*) FROM visit JOIN click ON visit = visit.id AND account_id = 2") == 6
