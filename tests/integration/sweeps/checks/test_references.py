"""Foreign keys on the rows that a sweep deletes: named by plan, doctor and the first run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from peewee import BigAutoField
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, Call, Delete, Sweep, UtcDateTimeField
from housekeeping.core.settings import Settings
from housekeeping.database.connection import Database
from housekeeping.doctor import stages
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.insight.plan import plan
from housekeeping.sweeps.registry import Finding
from housekeeping.sweeps.stages.table_stage import TableStage
from tests.session_settings import set_in_session

Do = Callable[[str], None]


class Cart(BaseModel):
    id = BigAutoField()
    touched_at = UtcDateTimeField()


class DeleteWithItems(Delete):
    def write(self, table: TableStage, step: Any, chosen: Any) -> Any:
        return super().write(table, step, chosen)


def sweep_with(action: Any) -> Sweep:
    return Sweep(
        name="shop.carts",
        stale=lambda now: Cart.touched_at < now,
        order=(Cart.touched_at, Cart.id),
        action=action,
    )


carts = sweep_with(Delete())


@pytest.fixture
def do(postgres: Database, admin: Connection) -> Do:
    def execute(statement: str) -> None:
        with admin.cursor() as cursor:
            cursor.execute(statement)

    execute("CREATE TABLE cart (id bigint PRIMARY KEY, touched_at timestamptz NOT NULL)")
    execute(
        "INSERT INTO cart SELECT n, '2026-01-01'::timestamptz + n * interval '1 s' FROM generate_series(1, 12) AS n"
    )
    return execute


def found(sweep: Sweep) -> list[Finding]:
    findings = stages.examine(Settings.load(), {sweep.name: sweep})
    return [each for each in findings if each.subject.startswith("references")]


ITEMS = "CREATE TABLE item (id bigint PRIMARY KEY, cart_id bigint REFERENCES cart (id) {on_delete})"
WAYS = (
    "leave referenced rows out of `stale`, or delete the rows of item first by a sweep of their own, "
    "or declare the foreign key ON DELETE CASCADE"
)
INDEX = "CREATE INDEX CONCURRENTLY ON item (cart_id)"
CASES = [
    ("", True, "NO ACTION, indexed: 3 of the first 12 stale rows are referenced and cannot be deleted", WAYS),
    (
        "ON DELETE RESTRICT",
        False,
        "RESTRICT, not indexed: referenced rows cannot be deleted (not counted, it has no index); "
        "each deleted row reads all of it",
        f"{INDEX}; {WAYS}",
    ),
    ("ON DELETE CASCADE", True, "CASCADE, indexed: its rows are deleted as well, and not counted", None),
    (
        "ON DELETE CASCADE",
        False,
        "CASCADE, not indexed: its rows are deleted as well, and not counted; each deleted row reads all of it",
        INDEX,
    ),
    ("ON DELETE SET NULL", True, "SET NULL, indexed: its rows are changed as well, and not counted", None),
]


@pytest.mark.parametrize("action", [Delete(), Call(print, then=Delete())])
@pytest.mark.parametrize(("on_delete", "indexed", "text", "way_out"), CASES)
def test_foreign_key_is_named_by_plan_and_doctor(
    do: Do, on_delete: str, indexed: bool, text: str, way_out: str | None, action: Any
) -> None:
    do(ITEMS.format(on_delete=on_delete))
    do("INSERT INTO item SELECT n, n FROM generate_series(1, 3) AS n")
    if indexed:
        do("CREATE INDEX ON item (cart_id)")

    (planned,) = plan(sweep_with(action)).as_json()["references"]
    (finding,) = found(sweep_with(action))

    if isinstance(action, Call):
        again = "; every run calls the function of its Call for them again"
        text = re.sub(r"cannot be deleted( \(not counted, it has no index\))?", rf"\g<0>{again}", text)
    whole = f"item (cart_id) references cart, ON DELETE {text}"
    assert (planned["text"], planned["way_out"]) == (finding.text, finding.way_out) == (whole, way_out)
    assert finding.level == planned["level"] == ("fine" if way_out is None else "warning")


def test_first_run_logs_one_line_for_each_foreign_key(do: Do, caplog: pytest.LogCaptureFixture) -> None:
    do(ITEMS.format(on_delete=""))
    do("CREATE TABLE note (cart_id bigint REFERENCES cart (id) ON DELETE CASCADE); CREATE INDEX ON note (cart_id)")

    caplog.set_level("INFO")

    def logged() -> list[Any]:
        return [vars(each)["text"] for each in caplog.records if each.message == "Deleted rows are referenced"]

    run_sweep(carts)
    first = logged()
    run_sweep(carts)

    assert [text.split(",")[0] for text in first] == [
        "item (cart_id) references cart",
        "note (cart_id) references cart",
    ]
    assert logged() == first


def test_restricting_key_without_referenced_rows_is_fine(do: Do) -> None:
    do(ITEMS.format(on_delete=""))
    do("CREATE INDEX ON item (cart_id)")

    (finding,) = found(carts)

    assert (finding.level, "none of the first 12 stale rows is referenced" in finding.text) == ("fine", True)


def test_single_referenced_row_is_named_in_the_singular(do: Do) -> None:
    do(ITEMS.format(on_delete=""))
    do("CREATE INDEX ON item (cart_id)")
    do("INSERT INTO item VALUES (1, 1)")

    (finding,) = found(carts)

    assert finding.text.endswith(": 1 of the first 12 stale rows is referenced and cannot be deleted")


def test_harmless_foreign_key_is_logged_at_level_info(do: Do, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    do(ITEMS.format(on_delete="ON DELETE CASCADE"))
    do("CREATE INDEX ON item (cart_id)")

    run_sweep(carts)

    [line] = [each for each in caplog.records if each.message == "Deleted rows are referenced"]
    assert (line.levelname, hasattr(line, "way_out")) == ("INFO", False)


def test_action_that_deletes_dependents_warns_of_a_missing_index_only(do: Do) -> None:
    do(ITEMS.format(on_delete=""))

    (finding,) = found(sweep_with(DeleteWithItems()))

    assert finding.way_out == INDEX


def test_partitioned_referencing_table_is_named_once(do: Do) -> None:
    do(
        "CREATE TABLE item (id bigint, cart_id bigint REFERENCES cart (id)) PARTITION BY LIST (id);"
        "CREATE TABLE item_1 PARTITION OF item DEFAULT"
    )

    (finding,) = found(carts)

    assert str(finding.way_out).startswith("CREATE INDEX ON item (cart_id); ")


def test_unreadable_table_is_not_counted(do: Do, postgres: Database, settings: Settings) -> None:
    do(ITEMS.format(on_delete=""))
    do("CREATE INDEX ON item (cart_id)")
    role = f"{settings.namespace}_reader"
    do(f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA {settings.namespace} TO {role}; GRANT SELECT ON cart TO {role}")
    set_in_session(postgres, f"SESSION AUTHORIZATION {role}")

    (finding,) = found(carts)

    set_in_session(postgres, "SESSION AUTHORIZATION DEFAULT")
    do(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert "not counted, this role cannot read it" in finding.text
