"""Dependents of the rows that a plain `Delete()` deletes, which PostgreSQL itself deletes, clears or refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from peewee import SQL, BigAutoField, BigIntegerField
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, Call, Delete, Rows, Settings, Sweep, UtcDateTimeField
from tests.declarations import changed
from tests.integration.conftest import Do
from tests.internals.database import Database
from tests.internals.doctor import stages
from tests.internals.engine import Finding, run_sweep
from tests.internals.insight import as_json, plan
from tests.session_settings import set_in_session


class Cart(BaseModel):
    id = BigAutoField()
    touched_at = UtcDateTimeField()


def sweep_with(action: Any) -> Sweep:
    return Sweep(
        "shop.carts", Rows(Cart, stale=lambda row, now: row.touched_at < now, order="touched_at", action=action)
    )


carts = sweep_with(Delete())


@pytest.fixture
def do(do: Do) -> Do:
    do("CREATE TABLE cart (id bigint PRIMARY KEY, touched_at timestamptz NOT NULL)")
    do("INSERT INTO cart SELECT n, '2026-01-01'::timestamptz + n * interval '1 s' FROM generate_series(1, 12) AS n")
    return do


def found(sweep: Sweep) -> list[Finding]:
    findings = stages.examine_stages(Settings.load(), {sweep.name: sweep})
    return [each for each in findings if each.subject.startswith("dependents")]


ITEMS = "CREATE TABLE item (id bigint PRIMARY KEY, cart_id bigint REFERENCES cart (id) {on_delete})"
WAYS = (
    'leave referenced rows out of `stale`, or decide about them: Delete(dependents={"item.cart_id": "delete"}), '
    'or "clear" or "keep"'
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

    (planned,) = as_json(plan(sweep_with(action)))["dependents"]
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


CHAIN = (
    "CREATE TABLE item (id bigint PRIMARY KEY, cart_id bigint REFERENCES cart (id) ON DELETE CASCADE);"
    "CREATE TABLE note (id bigint PRIMARY KEY, item_id bigint REFERENCES item (id) {on_delete});"
    "CREATE INDEX ON item (cart_id); CREATE INDEX ON note (item_id);"
    "INSERT INTO item SELECT n, n % 6 + 1 FROM generate_series(1, 24) AS n;"
    "INSERT INTO note SELECT n, n % 3 + 1 FROM generate_series(1, 9) AS n"
)


class Note(BaseModel):
    id = BigAutoField()
    item = BigIntegerField(column_name="item_id")


class LegalHold(BaseModel):
    id = BigAutoField()
    note = BigIntegerField(column_name="note_id")


def notes(**given: Any) -> Sweep:
    return Sweep("shop.notes", Rows(Note, stale=lambda row: row.id < 0, **{"action": Delete(), **given}))


held_notes = notes(hold=lambda row: LegalHold.note == row.id)


def lines(sweep: Sweep = carts, declared: Sequence[Sweep] = ()) -> dict[str, tuple[str, str]]:
    """Level and text of each foreign key in the plan, by its table; `doctor` must say the same."""
    planned = as_json(plan(sweep, declared=declared))["dependents"]
    findings = stages.examine_stages(Settings.load(), {each.name: each for each in (sweep, *declared)})
    found = [each for each in findings if each.subject.startswith("dependents") and each.area == sweep.name]
    assert [each["text"] for each in planned] == [each.text for each in found]
    return {each["table"]: (each["level"], each["text"]) for each in planned}


def test_key_behind_a_cascade_that_restricts_is_a_warning_with_its_chain(do: Do) -> None:
    do(CHAIN.format(on_delete="ON DELETE RESTRICT"))

    level, text = lines()["note"]
    result = run_sweep(carts)

    assert level == "warning"
    assert text == (
        "note (item_id) references item, ON DELETE RESTRICT, indexed: 3 of the first 12 stale rows are referenced and "
        "cannot be deleted; cart <- item (CASCADE) <- note (RESTRICT)"
    )
    assert (result.counts["deleted_rows"], result.counts["failed"]) == (9, 3), "as the plan says"


def test_key_that_sets_null_ends_the_chain(do: Do) -> None:
    do(CHAIN.format(on_delete="ON DELETE SET NULL"))
    do("CREATE TABLE mark (note_id bigint REFERENCES note (id))")

    found = lines()

    assert list(found) == ["item", "note"]
    assert found["note"][1].endswith(
        "its rows are changed as well, and not counted; cart <- item (CASCADE) <- note (SET NULL)"
    )


def test_missing_index_of_a_large_table_behind_a_cascade_is_a_warning(do: Do) -> None:
    do(CHAIN.format(on_delete="ON DELETE CASCADE"))
    do("DROP INDEX note_item_id_idx")
    small = lines()["note"][0]

    do("INSERT INTO note SELECT n, 1 FROM generate_series(10, 40000) AS n")
    (each,) = [each for each in plan(carts).dependents if each.link.table == "note"]

    assert (small, each.level, each.way_out) == ("fine", "warning", "CREATE INDEX CONCURRENTLY ON note (item_id)")


def test_cascade_onto_rows_that_another_sweep_holds_is_a_warning(do: Do, postgres: Database) -> None:
    do(CHAIN.format(on_delete="ON DELETE CASCADE"))
    postgres.create_tables([LegalHold])
    nothing_held = lines(declared=[held_notes])["note"]
    do("INSERT INTO legal_hold (note_id) VALUES (3), (6)")  # both of one item

    level, text = lines(declared=[carts, held_notes])["note"]

    assert nothing_held[0] == "fine"
    assert nothing_held[1].endswith(
        "none of the first 12 stale rows leads to rows that shop.notes holds; " + text.split("; ")[-1]
    )
    assert level == "warning"
    assert text == (
        "note (item_id) references item, ON DELETE CASCADE, indexed: its rows are deleted as well, and not counted; "
        "1 of the first 12 stale rows leads to rows that shop.notes holds; cart <- item (CASCADE) <- note (CASCADE)"
    )


def test_cascade_onto_rows_that_another_sweep_archives_is_a_warning(do: Do) -> None:
    do(CHAIN.format(on_delete="ON DELETE CASCADE"))

    level, text = lines(declared=[notes(action=Delete(archive_to="old_notes"))])["note"]

    assert (level, "they do not reach the archive of shop.notes" in text) == ("warning", True)


@pytest.mark.parametrize(("on_delete", "level"), [("NO ACTION", "fine"), ("RESTRICT", "warning")])
def test_rows_that_another_chain_deletes_prevent_nothing(do: Do, on_delete: str, level: str) -> None:
    do(
        "CREATE TABLE item (id bigint PRIMARY KEY, cart_id bigint REFERENCES cart (id) ON DELETE CASCADE);"
        "CREATE TABLE note (cart_id bigint REFERENCES cart (id) ON DELETE CASCADE,"
        f" item_id bigint REFERENCES item (id) ON DELETE {on_delete});"
        "CREATE INDEX ON item (cart_id); CREATE INDEX ON note (item_id); CREATE INDEX ON note (cart_id);"
        "INSERT INTO item VALUES (1, 1); INSERT INTO note VALUES (1, 1)"
    )

    found = [each for each in plan(carts).dependents if list(each.link.columns) == ["item_id"]]

    assert [each.level for each in found] == [level]


def test_chains_end_in_circles_and_trees(do: Do) -> None:
    do(
        "CREATE TABLE item (id bigint PRIMARY KEY, cart_id bigint REFERENCES cart (id) ON DELETE CASCADE,"
        " parent_id bigint REFERENCES item (id) ON DELETE CASCADE);"
        "ALTER TABLE cart ADD COLUMN item_id bigint REFERENCES item (id) ON DELETE CASCADE"
    )

    chains = [each.path_in_words for each in plan(carts).dependents]

    assert chains == [
        "cart <- item (CASCADE)",
        "cart <- item (CASCADE) <- cart (CASCADE)",
        "cart <- item (CASCADE) <- item (CASCADE)",
    ]


def test_chain_through_partitions_schemas_and_composite_keys_is_followed(
    do: Do, admin: Connection, settings: Settings
) -> None:
    other = f"{settings.namespace}_other"
    do(
        f"CREATE SCHEMA {other};"
        f'CREATE TABLE {other}."Item" (id bigint, "Day" date, cart_id bigint REFERENCES cart (id) ON DELETE CASCADE,'
        ' PRIMARY KEY (id, "Day")) PARTITION BY RANGE ("Day");'
        f"CREATE TABLE {other}.item_1 PARTITION OF {other}.\"Item\" FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');"
        f'CREATE TABLE {other}.item_2 PARTITION OF {other}."Item" DEFAULT;'
        f'CREATE INDEX ON {other}."Item" (cart_id);'
        "CREATE TABLE note (item_id bigint, day date,"
        f' FOREIGN KEY (item_id, day) REFERENCES {other}."Item" (id, "Day"));'
        "CREATE INDEX ON note (item_id, day);"
        f"INSERT INTO {other}.\"Item\" VALUES (1, '2020-05-05', 1), (2, '2022-01-01', 2);"
        "INSERT INTO note VALUES (1, '2020-05-05')"
    )

    found = plan(carts).dependents
    do(f"DROP SCHEMA {other} CASCADE")

    item = f'{other}."Item"'
    assert [each.path_in_words for each in found] == [
        f"cart <- {item} (CASCADE)",
        f"cart <- {item} (CASCADE) <- note (NO ACTION)",
    ]
    assert (found[1].referenced_rows, found[1].sampled_rows) == (1, 12)


def test_cascade_to_the_table_itself_names_its_own_hold(do: Do) -> None:
    do(
        "ALTER TABLE cart ADD COLUMN parent_id bigint REFERENCES cart (id) ON DELETE CASCADE;"
        "CREATE INDEX ON cart (parent_id); UPDATE cart SET parent_id = 1 WHERE id = 2"
    )
    held = changed(carts, hold=lambda row: row.id == 2)

    level, text = lines(held, [held])["cart"]

    assert (level, "1 of the first 11 stale rows leads to rows that shop.carts holds" in text) == ("warning", True)


def test_count_that_takes_too_long_is_left_out_of_the_plan(do: Do) -> None:
    do(CHAIN.format(on_delete="ON DELETE CASCADE"))
    slow = notes(hold=lambda row: SQL("pg_sleep(20) IS NULL"))

    planned = plan(carts, declared=[slow])

    (note,) = [each for each in planned.dependents if each.link.table == "note"]
    assert (note.level, note.referenced_rows) == ("warning", None)
    assert "also those that shop.notes holds; cart <-" in note.text


def fail() -> Any:
    raise ValueError("no hold today")


@pytest.mark.parametrize("hold", [fail, lambda: SQL("missing_column")])
def test_broken_hold_of_another_sweep_does_not_fail_the_plan(do: Do, hold: Any) -> None:
    do(CHAIN.format(on_delete="ON DELETE CASCADE"))

    planned = plan(carts, declared=[notes(hold=lambda row: hold())])

    assert [each.level for each in planned.dependents] == ["fine", "warning"]
