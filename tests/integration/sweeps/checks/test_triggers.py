"""Triggers and rules that a run would fire, as `plan` names them."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Call, Delete, Rows, Sweep, Transition
from tests.integration.sweeps.orders import Order, machine, stuck
from tests.internals.database import Database
from tests.internals.insight import as_json, plan

TRIGGERS = """
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE TABLE old_orders (LIKE orders, archived_at timestamptz, archived_by_run bigint);
CREATE TABLE note (order_id bigint REFERENCES orders (id) ON DELETE CASCADE);
CREATE TRIGGER on_delete AFTER DELETE ON orders FOR EACH STATEMENT EXECUTE FUNCTION note();
CREATE TRIGGER on_insert AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION note();
CREATE TRIGGER on_reference BEFORE UPDATE OF reference ON orders FOR EACH ROW EXECUTE FUNCTION note();
CREATE TRIGGER on_status BEFORE UPDATE OF status ON orders FOR EACH ROW EXECUTE FUNCTION note();
CREATE TRIGGER on_update AFTER INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION note();
CREATE TRIGGER switched_off AFTER DELETE OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION note();
ALTER TABLE orders DISABLE TRIGGER switched_off;
CREATE TRIGGER on_archive BEFORE INSERT ON old_orders FOR EACH ROW EXECUTE FUNCTION note();
CREATE RULE keep AS ON DELETE TO orders WHERE OLD.id < 0 DO INSTEAD NOTHING;
"""
DELETED = [
    "trigger on_delete on orders fires: AFTER DELETE, for each statement: note()",
    "rule keep on orders fires: ON DELETE DO INSTEAD; a batch fails unless exactly one statement replaces its own",
]
UPDATED = [
    "trigger on_status on orders fires: BEFORE UPDATE, for each row: note()",
    "trigger on_update on orders fires: AFTER UPDATE, for each row: note()",
]
ARCHIVED = "trigger on_archive on old_orders fires: BEFORE INSERT, for each row: note()"


@pytest.mark.parametrize(
    ("action", "texts"),
    [
        (Delete(), DELETED),
        (Delete(archive_to="old_orders"), [*DELETED, ARCHIVED]),
        (Transition(machine, "expire"), UPDATED),
        (Call(id, then=Transition(machine, "expire")), UPDATED),
    ],
)
def test_triggers_that_the_action_fires_are_named(
    postgres: Database, admin: Connection, action: Any, texts: list[str]
) -> None:
    postgres.create_tables([Order])
    with admin.cursor() as cursor:
        cursor.execute(TRIGGERS)

    planned = plan(Sweep("shop.stuck", Rows(Order, stale=stuck, order="updated_at", action=action)))

    assert sorted(each["text"] for each in as_json(planned)["triggers"]) == sorted(texts)


def test_trigger_of_a_partition_is_named_and_an_inherited_one_only_once(postgres: Database, admin: Connection) -> None:
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;"
            "CREATE TABLE orders (id int PRIMARY KEY, status text, reference text, updated_at timestamptz)"
            " PARTITION BY RANGE (id);"
            "CREATE TABLE orders_1 PARTITION OF orders DEFAULT;"
            "CREATE TRIGGER on_all AFTER DELETE ON orders FOR EACH ROW EXECUTE FUNCTION note();"
            "CREATE TRIGGER on_one AFTER DELETE ON orders_1 FOR EACH ROW EXECUTE FUNCTION note()"
        )

    planned = plan(Sweep("shop.stuck", Rows(Order, stale=stuck, order="updated_at", action=Delete())))

    assert [(each.name, each.table) for each in planned.triggers] == [("on_all", "orders"), ("on_one", "orders_1")]
