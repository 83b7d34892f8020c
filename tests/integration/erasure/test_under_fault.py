"""Erasures beside other sessions, after outages, and under hold."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from housekeeping import (
    Anonymise,
    Call,
    Delete,
    Guard,
    Keep,
    Objects,
    ObjectStoreSettings,
    Reference,
    Rows,
    Settings,
    Subject,
    Sweep,
)
from tests.integration.conftest import Locked
from tests.integration.erasure.shop import ERASED, MARKER, MARKER_ID, PERSON, ask, deciding, erase, row, rows, with_key
from tests.integration.several_databases import CI
from tests.internals.core import DatabaseUnavailable
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.erasures import ErasureInterrupted, execute, export, ledger, work

pytestmark = pytest.mark.usefixtures("customers")


def _execute(number: int, settings: Settings, subject: Subject = PERSON, sweeps: Any = ()) -> Any:
    execute(number, with_key(settings), {subject.name: subject}, sweeps)
    return row(number)


@pytest.mark.parametrize(
    ("table", "where"),
    [("item", "id = 3"), ("orders", "id = 2"), ("comment", "id = 3"), ("session", "id = 1"), ("newsletter", "id = 1")],
)
def test_locked_row_is_found_by_the_proof_and_the_rows_that_lead_to_it_stay(
    settings: Settings, locked: Locked, table: str, where: str
) -> None:
    with locked(f"SELECT FROM {table} WHERE {where} FOR UPDATE"):
        left = erase(settings)

    assert (left.state, left.proof["left"][table] > 0) == ("incomplete", True)
    assert left.error.endswith("left")
    again = erase(settings)
    assert (again.state, rows()) == ("done", ERASED)


def test_rows_that_the_application_writes_meanwhile_are_erased_in_the_next_pass(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, waiting = work.Erasing.left, [1]

    def write_first(self: Any) -> Any:
        if waiting:
            waiting.pop()
            database.execute_sql("INSERT INTO newsletter VALUES (9, %s)", (MARKER,))
            database.execute_sql("INSERT INTO attachment VALUES (9, 'Account', %s, 'late')", (MARKER_ID,))
        return left(self)

    monkeypatch.setattr(work.Erasing, "left", write_first)

    done = erase(settings)

    assert (done.state, done.proof["passes"], rows()) == ("done", 2, ERASED)


def test_value_that_changes_meanwhile_is_erased_as_well(settings: Settings) -> None:
    number = ask(settings)
    ledger.note(number, found=work.Erasing(PERSON, [str(MARKER_ID)], [], ()).versions)
    database.execute_sql("UPDATE account SET email = 'new@example.org' WHERE id = %s", (MARKER_ID,))
    database.execute_sql("INSERT INTO newsletter VALUES (8, 'new@example.org')")

    assert (_execute(number, settings).state, rows()) == ("done", ERASED)


def test_interrupted_erasure_still_knows_how_many_rows_are_kept(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first execution ends after its pass has cleared the link from the orders to the person."""
    number, subject = ask(settings), deciding(item=Keep("part of the order"))

    def fail(*_: Any) -> Any:
        raise DatabaseUnavailable("the database did not answer")

    with monkeypatch.context() as patch:
        patch.setattr(work.Erasing, "left", fail)
        with pytest.raises(DatabaseUnavailable):
            _execute(number, settings, subject)
    assert rows("account")["account"] == ERASED["account"]

    done = _execute(number, settings, subject)

    assert (done.state, done.proof["kept"]) == ("done", {"item": 8, "audit_entry": 1})


def test_failure_of_the_erasure_itself_ends_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError(f"no idea about {MARKER}")

    monkeypatch.setattr(work.Erasing, "left", fail)

    failed = erase(settings)

    assert (failed.state, failed.key, MARKER in failed.error) == ("failed", None, False)


def test_subject_that_writes_in_every_pass_is_incomplete(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    left = work.Erasing.left

    def write_first(self: Any) -> Any:
        database.execute_sql("INSERT INTO newsletter SELECT max(id) + 1, %s FROM newsletter", (MARKER,))
        return left(self)

    monkeypatch.setattr(work.Erasing, "left", write_first)

    assert (erase(settings).state, work.PASSES) == ("incomplete", 5)


def test_row_that_a_trigger_keeps_is_incomplete(settings: Settings, plant: Any) -> None:
    plant("DELETE ON session", "OLD.id = 3", "RAISE EXCEPTION 'not %', OLD.account_id")

    left = erase(settings)

    assert (left.state, left.proof["left"]["session"], left.proof["left"]["account"]) == ("incomplete", 1, 1)
    assert left.error.startswith("2 rows are left")
    assert str(MARKER_ID) not in left.error


def test_two_executions_at_once_erase_once(settings: Settings) -> None:
    number = ask(settings)

    def one() -> str:
        try:
            execute(number, with_key(settings), {"person": PERSON})
        except ErasureInterrupted:
            return "interrupted"
        finally:
            database.close()
        return "ended"

    with ThreadPoolExecutor(2) as pool:
        ended = [each.result() for each in [pool.submit(one) for _ in range(2)]]
    execute(number, with_key(settings), {"person": PERSON})

    assert "ended" in ended
    assert (row(number).state, rows()) == ("done", ERASED)
    assert row(number).counts["item"] == {"deleted": 8}


def test_two_executions_at_once_add_what_they_count(settings: Settings, tmp_path: Path) -> None:
    """Another process continues the erasure during the first call, and ends with the second one unavailable."""
    given, subject = _with_objects(settings, tmp_path)
    called: list[str] = []

    def first(key: str) -> None:
        called.append("first")
        if called == ["first"]:
            (tmp_path / f"users/{MARKER_ID}/late.png").write_text(MARKER)
            with pytest.raises(ErasureInterrupted):
                _execute(number, given, subject)

    def second(key: str) -> None:
        called.append("second")
        if called.count("second") == 1:
            raise ConnectionError

    subject = replace(subject, also=[Call(first), Call(second)])
    number = ask(given, subject)

    done = _execute(number, given, subject)

    counts = {name.rpartition(".")[2]: each for name, each in done.counts.items()}
    assert (done.state, called, rows()) == ("done", ["first", "first", "second", "second"], ERASED)
    assert (counts["objects in avatars"], counts["first"], counts["second"], counts["item"]) == (
        *({"deleted": 3}, {"called": 2}, {"called": 1}),
        {"deleted": 8},
    )


def test_sweep_that_deletes_the_subject_meanwhile(settings: Settings) -> None:
    decisions: Any = {"orders": "clear", "comment": "clear", "session": "delete"}
    rows_of = Rows("account", stale=lambda row: row.id == MARKER_ID, action=Delete(dependents=decisions))
    number = ask(settings)
    erasing = work.Erasing(PERSON, [str(MARKER_ID)], [], ())
    ledger.note(number, found=erasing.versions)
    run_sweep(Sweep("shop.accounts", rows_of, guard=Guard(first_run=False)))
    assert rows("account") == {"account": ERASED["account"]}

    done = _execute(number, settings)

    # What only the account led to is not found any more; the references from it are.
    assert (done.state, rows("newsletter", "attachment")) == (
        "done",
        {each: ERASED[each] for each in ("newsletter", "attachment")},
    )


@pytest.mark.parametrize(
    ("table", "hold", "text"),
    [
        ("account", lambda row: row.id == MARKER_ID, "on hold: account, by the hold of shop.held"),
        ("item", lambda row: row.id == 3, "on hold: item, by the hold of shop.held"),
        ("audit_entry", lambda row: row.id == 1, "on hold: audit_entry, by the hold of shop.held"),
    ],
)
def test_hold_of_any_table_refuses_it(settings: Settings, table: str, hold: Any, text: str) -> None:
    held = Sweep("shop.held", Rows(table, stale=lambda row: row.id < 0, hold=hold, action=Delete()))
    before = rows()

    refused = erase(settings, sweeps=[held])

    assert (refused.state, refused.error, rows()) == ("refused", text, before)


@pytest.mark.parametrize(("table", "decisions"), [("item", {"orders": Delete()}), ("orders", {}), ("session", {})])
def test_hold_that_begins_meanwhile_keeps_the_row_and_what_leads_to_it(
    settings: Settings, table: str, decisions: dict[str, Any]
) -> None:
    """Row 2 of a table is held as soon as the comments have been anonymised."""
    database.execute_sql(
        f"ALTER TABLE {table} ADD held boolean DEFAULT false;"
        "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN UPDATE {table} SET held = true WHERE id = 2; RETURN NULL; END $$;"
        "CREATE TRIGGER hold AFTER UPDATE ON comment FOR EACH STATEMENT EXECUTE FUNCTION hold()"
    )
    held = Sweep("shop.held", Rows(table, stale=lambda row: row.id < 0, hold=lambda row: row.held, action=Delete()))
    [before] = [row for row in rows(table)[table] if row[0] == 2]

    left = erase(settings, deciding(**decisions), sweeps=[held])

    text = f"on hold: {table}, by the hold of shop.held"
    assert (left.state, left.error.partition("left; ")[2]) == ("incomplete", text)
    assert (*before[:-1], True) in rows(table)[table] and len(rows("account")["account"]) == 2


def test_hold_of_others_does_not(settings: Settings) -> None:
    held = Sweep(
        "shop.held", Rows("item", stale=lambda row: row.id < 0, hold=lambda row: row.id == 12, action=Delete())
    )

    assert (erase(settings, sweeps=[held]).state, rows()) == ("done", ERASED)


def _with_objects(settings: Settings, folder: Path, **changes: Any) -> tuple[Settings, Subject]:
    for owner in (MARKER_ID, 1, 4711470):
        (folder / f"users/{owner}/small").mkdir(parents=True)
        for name in ("a.png", "small/b.png"):
            (folder / f"users/{owner}/{name}").write_text(MARKER)
    stores = {"avatars": ObjectStoreSettings(url=f"file://{folder}")}
    subject = replace(deciding(**changes), objects=[Objects("avatars", "users/{id}/")])
    return settings.model_copy(update={"object_stores": stores}), subject


def _files(folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*.png"))


def test_objects_are_deleted_before_the_rows(settings: Settings, tmp_path: Path) -> None:
    given, subject = _with_objects(settings, tmp_path)

    done = erase(given, subject)

    others = [f"users/{owner}/{name}" for owner in (1, 4711470) for name in ("a.png", "small/b.png")]
    assert (done.state, _files(tmp_path)) == ("done", others)
    assert done.counts["objects in avatars"] == {"deleted": 2}
    assert any("avatars" in each for each in done.outside)


def test_objects_of_a_subject_that_is_gone_do_not_stop_it(settings: Settings, tmp_path: Path) -> None:
    given, subject = _with_objects(settings, tmp_path)
    named = replace(subject, objects=[Objects("avatars", "users/{email}/")])

    assert [erase(given, named).state for _ in range(2)] == ["done", "done"]


def test_unavailable_store_keeps_the_rows_until_it_is_back(settings: Settings, tmp_path: Path) -> None:
    given, subject = _with_objects(settings, tmp_path)
    number, before = ask(given, subject), rows()
    tmp_path.rename(f"{tmp_path}.away")

    with pytest.raises((ErasureInterrupted, Exception), match="avatars"):
        _execute(number, given, subject)
    assert (row(number).state, rows()) == ("running", before)
    Path(f"{tmp_path}.away").rename(tmp_path)

    assert (_execute(number, given, subject).state, rows()) == ("done", ERASED)


@pytest.mark.parametrize("value", ["", "..", "a/b"])
def test_value_that_names_the_objects_of_others_refuses_it(settings: Settings, tmp_path: Path, value: str) -> None:
    given, subject = _with_objects(settings, tmp_path)
    database.execute_sql("UPDATE account SET email = %s WHERE id = %s", (value, MARKER_ID))
    named = replace(subject, objects=[Objects("avatars", "users/{email}/")])

    refused = erase(given, named)

    assert (refused.state, len(_files(tmp_path))) == ("refused", 6)
    assert "the column email of the subject cannot be part of a key" in refused.error


def test_other_systems_are_called_with_the_key_until_they_answer(settings: Settings) -> None:
    called: list[Any] = []

    def forget(key: str) -> None:
        called.append(key)
        if len(called) == 1:
            raise ConnectionError(f"no answer about {key}")

    subject = replace(PERSON, also=[Call(forget)])
    number, before = ask(settings, subject), rows()

    with pytest.raises(ErasureInterrupted) as interrupted:
        _execute(number, settings, subject)
    assert (rows(), str(MARKER_ID) in str(interrupted.value)) == (before, False)

    done = _execute(number, settings, subject)
    assert (done.state, called, rows()) == ("done", [str(MARKER_ID)] * 2, ERASED)


def test_other_system_that_fails_fails_it_without_its_text(settings: Settings) -> None:
    def forget(key: str) -> None:
        raise ValueError(f"cannot forget {key}")

    subject = replace(PERSON, also=[Call(forget)])
    before = rows()

    failed = erase(settings, subject)

    assert (failed.state, rows()) == ("failed", before)
    assert failed.error.endswith("raised ValueError")


# -- other databases


CI_TABLES = (
    "CREATE TABLE build (id bigint PRIMARY KEY, account bigint, log text);"
    "CREATE TABLE step (id bigint PRIMARY KEY, build_id bigint NOT NULL REFERENCES build ON DELETE CASCADE);"
    "CREATE TABLE shipment (id bigint PRIMARY KEY, order_id bigint, address text);"
    "INSERT INTO build SELECT n, CASE WHEN n <= 3 THEN 471147 ELSE 1 END, 'x' FROM generate_series(1, 5) AS n;"
    "INSERT INTO step SELECT n, n FROM generate_series(1, 5) AS n;"
    "INSERT INTO shipment SELECT n, n, 'street' FROM generate_series(1, 6) AS n"
)


@pytest.fixture
def builds(two: Settings) -> Settings:
    with database.using(CI):
        database.execute_sql(CI_TABLES)
    return two


def _of_two_databases(build: Any, shipment: Any) -> Subject:
    references = [
        Reference("build.account", "account.id", database=CI),
        Reference("shipment.order_id", "orders.id", database=CI),
    ]
    decided = deciding(build=build, shipment=shipment, step=Delete())
    return Subject("person", "account", tables=decided.tables, references=[*PERSON.references, *references])


def _ci(query: str) -> list[Any]:
    with database.using(CI):
        return list(database.execute_sql(query).fetchall())


@pytest.mark.parametrize(
    ("build", "shipment", "builds_left", "shipments_left"),
    [
        (Delete(), Delete(), [(4, 1, "x"), (5, 1, "x")], [(5, 5, "street"), (6, 6, "street")]),
        (
            Anonymise(account=None, log=""),
            Keep("insurance", anonymise={"address": ""}),
            [(1, None, ""), (2, None, ""), (3, None, ""), (4, 1, "x"), (5, 1, "x")],
            [*((n, n, "") for n in range(1, 5)), (5, 5, "street"), (6, 6, "street")],
        ),
    ],
)
def test_rows_of_other_databases_are_decided_likewise(
    builds: Settings, build: Any, shipment: Any, builds_left: Any, shipments_left: Any
) -> None:
    done = erase(builds, _of_two_databases(build, shipment))

    assert (done.state, done.error) == ("done", None)
    assert rows() == ERASED
    assert _ci("SELECT * FROM build ORDER BY 1") == builds_left
    assert _ci("SELECT * FROM shipment ORDER BY 1") == shipments_left
    assert _ci("SELECT id FROM step ORDER BY 1") == [(4,), (5,)]
    assert done.counts["step"] == {"deleted": 3}


def test_references_by_one_column_to_several_tables_erase_no_rows_of_others(builds: Settings) -> None:
    with database.using(CI):
        database.execute_sql("CREATE TABLE file (id bigint PRIMARY KEY, owner_type text, owner_id bigint)")
        database.execute_sql("INSERT INTO file SELECT n, 'orders', n FROM generate_series(1, 6) AS n")
        database.execute_sql("INSERT INTO file SELECT n + 100, 'item', n FROM generate_series(1, 12) AS n")
    references = [
        Reference("file.owner_id", f"{each}.id", where=f"owner_type = '{each}'", database=CI)
        for each in ("orders", "item")
    ]
    subject = replace(deciding(file=Delete()), references=[*PERSON.references, *references])

    done = erase(builds, subject)

    assert (done.state, rows(), done.counts["file"]) == ("done", ERASED, {"deleted": 12})
    assert _ci("SELECT id FROM file ORDER BY 1") == [(5,), (6,), (109,), (110,), (111,), (112,)]


def test_export_has_the_rows_of_all_databases_and_an_erasure_leaves_none(builds: Settings) -> None:
    subject = _of_two_databases(Delete(), Delete())
    erasing = work.Erasing(subject, [str(MARKER_ID)], [], ())

    lines = [json.loads(each) for each in export(subject, erasing.reach, erasing.found, builds)]

    found: dict[str, list[int]] = {}
    for each in lines:
        if each.get("database") == CI:
            found.setdefault(each["table"], []).append(each["row"]["id"])
    assert found == {"build": [1, 2, 3], "shipment": [1, 2, 3, 4], "step": [1, 2, 3]}
    assert len(lines) == 23 + 10
    assert erase(builds, subject).state == "done"
    again = work.Erasing(subject, [str(MARKER_ID)], [erasing.found], ())
    assert not any(again.left().values())


def test_locked_row_of_another_database_keeps_what_leads_to_it(builds: Settings) -> None:
    subject = _of_two_databases(Delete(), Delete())
    other = database.by_name()[CI]._connect()
    other.autocommit = False
    other.cursor().execute("SELECT FROM shipment WHERE id = 3 FOR UPDATE")

    left = erase(builds, subject)
    other.rollback()
    other.close()

    assert (left.state, left.proof["left"]["shipment"]) == ("incomplete", 1)
    assert (erase(builds, subject).state, rows()) == ("done", ERASED)
    assert _ci("SELECT id FROM shipment ORDER BY 1") == [(5,), (6,)]


def test_unavailable_database_keeps_the_subject(builds: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = _of_two_databases(Delete(), Delete())
    number, before = ask(builds, subject), rows("account", "orders")

    def fail(*_: Any, **__: Any) -> Any:
        raise DatabaseUnavailable("the database 'ci' did not answer")

    with monkeypatch.context() as patch:
        patch.setattr(database.by_name()[CI], "execute_sql", fail)
        with pytest.raises(DatabaseUnavailable):
            _execute(number, builds, subject)

    assert (row(number).state, rows("account", "orders")) == ("running", before)
    assert (_execute(number, builds, subject).state, rows()) == ("done", ERASED)
