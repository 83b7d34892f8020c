"""A new user declares a cascade over eleven tables, four levels, with a circle: each attempt says what is missing."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import DeclarationError, Delete, Reference, Rows, Sweep
from tests.integration.conftest import Do
from tests.internals.engine import run_sweep
from tests.internals.insight import Plan, plan

SCHEMA = """
CREATE TABLE account (id bigint PRIMARY KEY, closed_at timestamptz);
CREATE TABLE profile (id bigint PRIMARY KEY, account_id bigint NOT NULL REFERENCES account (id) ON DELETE CASCADE);
CREATE TABLE team (id bigint PRIMARY KEY, owner_id bigint NOT NULL REFERENCES account (id));
ALTER TABLE account ADD COLUMN team_id bigint REFERENCES team (id) ON DELETE SET NULL;
CREATE TABLE orders (id bigint PRIMARY KEY, account_id bigint NOT NULL REFERENCES account (id));
CREATE TABLE order_item (id bigint PRIMARY KEY, order_id bigint NOT NULL REFERENCES orders (id) ON DELETE CASCADE);
CREATE TABLE shipment (id bigint PRIMARY KEY, item_id bigint NOT NULL REFERENCES order_item (id));
CREATE TABLE shipment_event (id bigint PRIMARY KEY, shipment_id bigint NOT NULL REFERENCES shipment ON DELETE CASCADE);
CREATE TABLE invoice (id bigint PRIMARY KEY, order_id bigint NOT NULL REFERENCES orders (id) ON DELETE RESTRICT);
CREATE TABLE comment (id bigint PRIMARY KEY, author_id bigint REFERENCES account (id) ON DELETE SET NULL);
CREATE TABLE login (account_id bigint NOT NULL REFERENCES account (id) ON DELETE CASCADE, at timestamptz NOT NULL);
CREATE TABLE attachment (id bigint PRIMARY KEY, owner_type text NOT NULL, owner_id bigint NOT NULL);
CREATE INDEX ON account (closed_at, id); CREATE INDEX ON account (team_id); CREATE INDEX ON profile (account_id);
CREATE INDEX ON team (owner_id); CREATE INDEX ON orders (account_id); CREATE INDEX ON order_item (order_id);
CREATE INDEX ON shipment (item_id); CREATE INDEX ON shipment_event (shipment_id); CREATE INDEX ON invoice (order_id);
CREATE INDEX ON comment (author_id); CREATE INDEX ON login (account_id); CREATE INDEX ON attachment (owner_id);
INSERT INTO account VALUES (1, '2020-01-01'), (2, '2020-01-02'), (3, NULL);
INSERT INTO orders VALUES (10, 1), (11, 1), (20, 2), (30, 3); INSERT INTO order_item VALUES (100, 10), (200, 20);
INSERT INTO shipment VALUES (1000, 100); INSERT INTO shipment_event VALUES (1, 1000), (2, 1000);
INSERT INTO invoice VALUES (1, 20); INSERT INTO comment VALUES (1, 1), (2, 3); INSERT INTO team VALUES (1, 1);
UPDATE account SET team_id = 1; INSERT INTO attachment VALUES (1, 'Account', 1), (2, 'Team', 1);
"""


@pytest.fixture
def do(do: Do) -> Do:
    do(SCHEMA)
    return do


def closed_accounts(dependents: Any, *references: Reference) -> Sweep:
    return Sweep(
        "shop.closed_accounts",
        Rows("account", stale=lambda row, now: row.closed_at < now, age=timedelta(days=90), order="closed_at",
             action=Delete(dependents=dependents, references=references)),
    )  # fmt: skip


ATTACHMENTS = Reference("attachment.owner_id", "account.id", where="owner_type = 'Account'")
DECISIONS = {"orders": "delete", "team": "delete", "invoice": "keep", "shipment": "delete", "attachment": "delete"}


def attempt(dependents: Any, *references: Reference) -> Plan:
    return plan(closed_accounts(dependents, *references))


def refusal(dependents: Any, *references: Reference) -> str:
    with pytest.raises(DeclarationError) as refused:
        attempt(dependents, *references)
    assert refused.value.exit_code == 2
    return str(refused.value).removeprefix("shop.closed_accounts: ")


def test_each_attempt_says_exactly_what_is_missing_until_it_is_right(do: Do) -> None:
    first = refusal(True)
    second = refusal({"orders": "delete", "team": "delete"})
    third = refusal({name: "delete" for name in DECISIONS if name != "attachment"}, ATTACHMENTS)
    fourth = refusal({**DECISIONS, "shipments": "delete"}, ATTACHMENTS)
    fifth = refusal({**DECISIONS, "team": "clear"}, ATTACHMENTS)
    do(fifth.partition("; ")[2].partition(", or ")[0])
    sixth = refusal({**DECISIONS, "team": "clear"}, ATTACHMENTS)
    planned = attempt(DECISIONS, ATTACHMENTS)

    assert first == (
        "2 links have no decision: orders.account_id (references account, ON DELETE NO ACTION), team.owner_id "
        '(references account, ON DELETE NO ACTION); decide "delete", "clear" or "keep" for each: '
        'dependents={"orders.account_id": "keep", "team.owner_id": "keep"}'
    )
    assert second == (
        "2 links have no decision: invoice.order_id (references orders, ON DELETE RESTRICT), shipment.item_id "
        '(references order_item, ON DELETE NO ACTION); decide "delete", "clear" or "keep" for each: '
        'dependents={"orders": "delete", "team": "delete", "invoice.order_id": "keep", "shipment.item_id": "keep"}'
    )
    assert third.startswith("1 link has no decision: attachment.owner_id (references account, a Reference); decide")
    assert fourth == "no link has the name 'shipments'; did you mean 'shipment'?"
    assert fifth.startswith("login has no primary key; ALTER TABLE login ADD COLUMN id bigint GENERATED ALWAYS AS")
    assert sixth.startswith("team.owner_id cannot be cleared, because owner_id is NOT NULL; ALTER TABLE team ALTER")
    assert len({link.link.table for link in planned.dependents}) == 11
    assert max(len(each.path) for each in planned.dependents) == 4
    assert len(inspect.getsource(closed_accounts).splitlines()) + len(("ATTACHMENTS", "DECISIONS")) < 10


def test_plan_of_the_right_declaration_shows_the_whole_tree(do: Do) -> None:
    do("ALTER TABLE login ADD COLUMN id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY")

    planned = attempt(DECISIONS, ATTACHMENTS)

    found = {each.link.name: (each.link.decision, each.rows, each.is_exact) for each in planned.dependents}
    assert found == {
        "attachment.owner_id": ("delete", 1, True),
        "comment.author_id": ("clear", 1, True),
        "login.account_id": ("delete", 0, True),
        "orders.account_id": ("delete", 3, True),
        "profile.account_id": ("delete", 0, True),
        "team.owner_id": ("delete", 1, True),
        "invoice.order_id": ("keep", 1, True),
        "order_item.order_id": ("delete", 2, True),
        "account.team_id": ("clear", 3, True),
        "shipment.item_id": ("delete", 1, True),
        "shipment_event.shipment_id": ("delete", 2, True),
    }


def test_run_of_the_right_declaration_deletes_the_whole_tree(do: Do, admin: Connection) -> None:
    do("ALTER TABLE login ADD COLUMN id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY")

    result = run_sweep(closed_accounts(DECISIONS, ATTACHMENTS), confirmed=True)

    counts = {name: result.counts[name] for name in ("deleted_rows", "blocked")}
    assert (result.outcome, counts) == ("done", {"deleted_rows": 1, "blocked": 1})
    with admin.cursor() as cursor:
        cursor.execute("SELECT (SELECT array_agg(id ORDER BY id) FROM account), (SELECT count(*) FROM shipment_event)")
        assert cursor.fetchone() == ([2, 3], 0)
