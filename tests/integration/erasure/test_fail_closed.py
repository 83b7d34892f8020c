"""A table that reaches the subject and has no decision stops the erasure, before anything changes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

import pytest

from housekeeping import Anonymise, Call, DeclarationError, Delete, Keep, Objects, Reference, Settings, Subject
from tests.integration.erasure.shop import ERASED, MARKER, MARKER_ID, PERSON, ask, deciding, erase, row, rows, with_key
from tests.integration.several_databases import CI
from tests.internals.core import WrongArgument
from tests.internals.database import database
from tests.internals.erasures import Erasure, execute, ledger, request

pytestmark = pytest.mark.usefixtures("customers")

RELEASE: Final = 'Keep("why", anonymise={{"{}": None}})'


def _refusal(settings: Settings, subject: Subject, key: Any = MARKER_ID) -> str:
    before = rows()
    refused = erase(settings, subject, key)
    assert (refused.state, refused.counts, refused.key, rows()) == ("refused", {}, None, before)
    return str(refused.error)


@pytest.mark.parametrize("text", ["a\0b", "\udcff"])
@pytest.mark.parametrize("name", ["reason", "requester"])
def test_text_that_cannot_be_stored_is_refused(settings: Settings, name: str, text: str) -> None:
    texts = {"reason": "of May", "requester": "operator", name: text}

    with pytest.raises(WrongArgument, match=f"the {name} contains"):
        request({"person": PERSON}, with_key(settings), "person", MARKER_ID, **texts)

    assert Erasure.select().count() == 0


def test_key_of_one_row_that_another_one_has_in_its_column_is_refused(settings: Settings) -> None:
    database.execute_sql("UPDATE account SET email = %s WHERE id = 1", (str(MARKER_ID),))
    before = rows()

    with pytest.raises(DeclarationError, match="one row of account has this primary key, and another one .* email"):
        ask(settings)

    assert (rows(), Erasure.select().count()) == (before, 0)
    assert row(ask(settings, key=(MARKER_ID,))).key == row(ask(settings, key=MARKER)).key == [str(MARKER_ID)]
    assert row(ask(settings, key=1)).key == ["1"]
    database.execute_sql("UPDATE account SET email = NULL; UPDATE account SET email = id::text")
    assert row(ask(settings)).key == [str(MARKER_ID)]  # both lead to the same row


@pytest.mark.parametrize("state", ["done", "running", "incomplete", "failed"])
def test_key_of_an_erased_row_that_another_one_has_in_its_column_is_refused(settings: Settings, state: str) -> None:
    """The row was deleted before the erasure ended."""
    erased = erase(settings)
    open_again = {"ended_at": None, "key": [str(MARKER_ID)]} if state == "running" else {}
    Erasure.update(state=state, **open_again).execute()
    database.execute_sql("UPDATE account SET email = %s WHERE id = 1", (str(MARKER_ID),))
    before = rows()

    with pytest.raises(DeclarationError, match="the person with this primary key was erased, and another one"):
        ask(settings)

    assert (rows(), Erasure.select().count()) == (before, 1)
    assert row(ask(settings, key=(MARKER_ID,))).key_hmac == erased.key_hmac
    assert row(ask(settings, key=1)).key == ["1"]


@pytest.mark.parametrize("subject", [PERSON, replace(PERSON, by=None, objects=[Objects("pictures", "{nick}/")])])
def test_column_that_is_renamed_after_the_request_is_refused(settings: Settings, subject: Subject) -> None:
    database.execute_sql("ALTER TABLE account ADD nick text")
    subject = replace(subject, by=subject.by and "nick")
    number = ask(settings, subject)
    database.execute_sql("ALTER TABLE account RENAME nick TO nickname")
    before = rows()

    execute(number, with_key(settings), {"person": subject})

    assert (row(number).state, rows()) == ("refused", before)
    assert "has no column 'nick'" in row(number).error


def test_all_undecided_tables_are_named_with_the_lines_to_add(settings: Settings) -> None:
    text = _refusal(settings, deciding(session=None, newsletter=None, item=None))

    assert text.startswith("3 links without a decision: ")
    assert "session.account_id (references account, ON DELETE CASCADE)" in text
    assert "newsletter.email (references account, a Reference)" in text
    assert 'add to `tables` of Subject("person"): ' in text
    assert all(f'"{name}": Delete()' in text for name in ("session", "newsletter"))
    assert '"item": Keep("why")' in text  # the orders stay


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("CREATE TABLE added (id int PRIMARY KEY, session_id bigint REFERENCES session ON DELETE CASCADE)", "added"),
        ("CREATE TABLE added (id int PRIMARY KEY, item_id bigint REFERENCES item ON DELETE SET NULL)", "added"),
        ("CREATE TABLE added (id int PRIMARY KEY, a_id bigint, FOREIGN KEY (a_id) REFERENCES account)", "added"),
        ("CREATE SCHEMA late_{0}; CREATE TABLE late_{0}.added (id int, o bigint REFERENCES orders)", "late_{0}.added"),
        ("ALTER TABLE account ADD invited_by bigint REFERENCES account", "account.invited_by"),
    ],
)
def test_table_or_link_of_a_migration_stops_it(settings: Settings, statement: str, line: str) -> None:
    schema = settings.namespace.replace("-", "_").replace(".", "_")
    database.execute_sql(statement.format(schema))
    try:
        assert f'"{line.format(schema)}": ' in _refusal(settings, PERSON)
    finally:
        database.execute_sql(f"DROP SCHEMA IF EXISTS late_{schema} CASCADE")


@pytest.mark.parametrize(
    ("statement", "removed", "lines"),
    [
        ("SELECT", ["comment.parent_id"], {"comment.parent_id": "Anonymise(parent_id=None)"}),
        (
            "SELECT",
            ["comment.parent_id", "comment.author_id"],
            {"comment.author_id": "Delete()", "comment.parent_id": "Anonymise(parent_id=None)"},
        ),
        ("SELECT", ["item"], {"item": 'Keep("why")'}),  # the orders stay
        ("SELECT", ["orders", "item"], {"orders": "Delete()", "item": "Delete()"}),
        (
            "CREATE TABLE seen (order_id bigint REFERENCES orders ON DELETE CASCADE)",
            [],
            {"seen": 'Keep("why")'},
        ),
        (
            "CREATE TABLE note (id int PRIMARY KEY, by bigint REFERENCES account, of_id bigint REFERENCES account); "
            "CREATE TABLE page (note_id bigint REFERENCES note ON DELETE CASCADE)",
            [],
            {"note.by": RELEASE.format("by"), "note.of_id": RELEASE.format("of_id"), "page": 'Keep("why")'},
        ),
        (
            "ALTER TABLE comment ADD reviewer_id bigint REFERENCES account",
            [],
            {"comment.reviewer_id": RELEASE.format("reviewer_id")},
        ),
        (
            "ALTER TABLE comment ADD reviewer_id bigint NOT NULL DEFAULT 1 REFERENCES account",
            [],
            {"comment.reviewer_id": 'Keep("why")'},
        ),
        (
            "CREATE TABLE note (id int PRIMARY KEY, by bigint REFERENCES account, of_id bigint REFERENCES account)",
            [],
            {"note.by": RELEASE.format("by"), "note.of_id": RELEASE.format("of_id")},
        ),
        (
            "CREATE TABLE part (id int PRIMARY KEY, item_id bigint REFERENCES item ON DELETE CASCADE, "
            "packed_by bigint REFERENCES account)",
            [],
            {"part.packed_by": RELEASE.format("packed_by"), "part.item_id": "Delete()"},
        ),
    ],
)
def test_delete_is_no_advice_for_a_link_by_which_others_refer_to_the_subject(
    settings: Settings, statement: str, removed: list[str], lines: dict[str, str]
) -> None:
    database.execute_sql(statement)
    subject = replace(PERSON, tables={name: each for name, each in PERSON.tables.items() if name not in removed})

    text = _refusal(settings, subject)

    advice = text.partition('add to `tables` of Subject("person"): ')[2].partition("; or Keep")[0]
    assert sorted(re.split(', (?=")', advice)) == sorted(f'"{name}": {decision}' for name, decision in lines.items())


def _add_sessions(of_person: int, of_other: int) -> None:
    sql = "INSERT INTO session SELECT n, CASE WHEN n < %s THEN %s ELSE 1 END FROM generate_series(100, %s) AS n"
    database.execute_sql(sql, (100 + of_person, MARKER_ID, 99 + of_person + of_other))


def test_much_of_a_table_needs_a_confirmation(settings: Settings) -> None:
    called: list[Any] = []
    subject = replace(PERSON, also=[Call(lambda key: called.append(key))])
    _add_sessions(1100, 3000)

    text = _refusal(settings, subject)
    number = ask(settings, subject)
    again = ledger.request("person", [str(MARKER_ID)], row(number).key_hmac, requester="", reason=None, confirmed=True)
    execute(number, with_key(settings), {"person": subject})

    assert text == (
        "1,105 of about 4,108 rows of session belong to this person, over the limit of 999. "
        "Look: housekeeping erase person KEY --dry-run; then: housekeeping erase person KEY --confirm"
    )
    assert (again, row(number).state, rows("account")["account"]) == (number, "done", ERASED["account"])
    assert called == [str(MARKER_ID)]  # not by the refused one


@pytest.mark.parametrize(("of_person", "of_other"), [(994, 0), (1100, 5000)])
def test_few_rows_or_a_small_share_need_no_confirmation(settings: Settings, of_person: int, of_other: int) -> None:
    _add_sessions(of_person, of_other)

    assert erase(settings).state == "done"


def test_erasure_that_has_begun_is_continued_without_a_confirmation(settings: Settings) -> None:
    _add_sessions(1100, 0)
    number = ask(settings)
    Erasure.update(counts={"session": {"deleted": 1000}}).where(Erasure.id == number).execute()

    execute(number, with_key(settings), {"person": PERSON})

    assert row(number).state == "done"


def _generated(tables: int) -> tuple[str, dict[str, Any]]:
    """Return a schema of tables, each of which refers to an earlier one, and decisions about them."""
    statements, decisions = ["CREATE TABLE t0 (id bigint PRIMARY KEY)"], dict[str, Any]()
    for number in range(1, tables):
        above = (number * 7) // 10
        rule = ("CASCADE", "NO ACTION", "RESTRICT")[number % 3]
        statements.append(
            f"CREATE TABLE t{number} (id bigint PRIMARY KEY, up bigint REFERENCES t{above} ON DELETE {rule})"
        )
        decisions[f"t{number}"] = Keep("a reason", anonymise={"up": None}) if number % 4 == 1 else Delete()
    statements += [
        f"INSERT INTO t{n} SELECT m{', m' if n else ''} FROM generate_series(1, 3) AS m" for n in range(tables)
    ]
    return "; ".join(statements), decisions


def test_forty_tables_and_one_that_was_added_after_the_declaration(settings: Settings) -> None:
    statements, decisions = _generated(40)
    database.execute_sql(statements)
    subject = Subject("node", "t0", tables=decisions)
    database.execute_sql("CREATE TABLE t40 (id bigint PRIMARY KEY, up bigint REFERENCES t39 ON DELETE CASCADE)")

    refused = erase(settings, subject, 2)
    database.execute_sql("DROP TABLE t40")
    done = erase(settings, subject, 2)

    assert (refused.state, done.state) == ("refused", "done"), (refused.error, done.error)
    assert 't40.up (references t39, ON DELETE CASCADE); add to `tables` of Subject("node"): "t40": Delete()' in (
        refused.error
    )
    found = {f"t{n}": rows(f"t{n}")[f"t{n}"] for n in range(1, 40)}
    deleted = {name for name, each in found.items() if [row[0] for row in each] == [1, 3]}
    assert deleted == {name for name, decision in decisions.items() if decision == Delete()}
    assert all(row[1] != 2 for each in found.values() for row in each)


@pytest.mark.parametrize(
    ("references", "line"),
    [
        ([Reference("device.owner", "account.id", where="kind = 'person'")], '"device": Delete()'),
        ([Reference("device.owner", "item.id")], '"device": Delete()'),
        ([Reference("build.account", "account.id", database=CI)], '"build": Delete()'),
        ([Reference("build.account", "orders.id", database=CI)], '"build": Keep("why")'),  # the orders stay
    ],
)
def test_declared_references_need_a_decision_as_well(two: Settings, references: list[Reference], line: str) -> None:
    database.execute_sql("CREATE TABLE device (id bigint PRIMARY KEY, owner bigint, kind text)")
    with database.using(CI):
        database.execute_sql("CREATE TABLE build (id bigint PRIMARY KEY, account bigint)")

    text = _refusal(two, replace(PERSON, references=[*PERSON.references, *references]))

    assert line in text


def test_table_of_another_database_that_a_reference_leads_to_needs_one(two: Settings) -> None:
    with database.using(CI):
        database.execute_sql("CREATE TABLE build (id bigint PRIMARY KEY, account bigint)")
        database.execute_sql("CREATE TABLE log (id bigint PRIMARY KEY, build_id bigint REFERENCES build)")
    references = [*PERSON.references, Reference("build.account", "account.id", database=CI)]

    assert '"log": Delete()' in _refusal(two, replace(deciding(build=Delete()), references=references))


@pytest.mark.parametrize(
    ("decisions", "text"),
    [
        ({"orders": Keep("tax law")}, 'ON DELETE NO ACTION; add anonymise={"account_id": None} to the decision'),
        ({"session": Keep("x")}, "ALTER COLUMN account_id DROP NOT NULL, and add anonymise"),
        ({"session": Anonymise(account_id=None)}, "session.account_id cannot be anonymised with None"),
        ({"orders": Anonymise(account_id=None, name=None)}, "orders.name cannot be anonymised with None"),
        ({"orders": Anonymise(account_id=None, nme="x")}, "orders has no column 'nme' to anonymise; it has account_id"),
        ({"orders": Anonymise(account_id="x")}, "orders.account_id does not take the value 'x'; write a value of"),
        ({"comment__author_id": Anonymise(author_id=None, text="x" * 21)}, "write a shorter text: its type is"),
        ({"comment__parent_id": None, "comment": Delete(), "comment__author_id": None, "item": None}, '"item": K'),
        ({"comment__parent_id": None, "comment": Anonymise(text="")}, '"comment.parent_id": Anonymise(parent_id=None)'),
        ({"sesion": Delete()}, "no link has the name 'sesion'; did you mean 'session'?"),
    ],
)
def test_decision_that_cannot_be_carried_out_is_refused(
    settings: Settings, decisions: dict[str, Any], text: str
) -> None:
    assert text in _refusal(settings, deciding(**decisions))


def test_two_links_that_give_a_column_different_values_are_refused(settings: Settings) -> None:
    database.execute_sql("ALTER TABLE audit_entry ADD by bigint, ADD note text")
    decided = {"audit_entry.account_id": Anonymise(note="a"), "audit_entry.by": Anonymise(note="b")}
    tables = {name: each for name, each in PERSON.tables.items() if name != "audit_entry"} | decided
    references = [*PERSON.references, Reference("audit_entry.by", "account.id")]

    text = _refusal(settings, replace(PERSON, tables=tables, references=references))

    assert text == "audit_entry.account_id and audit_entry.by give note different values; write the same value"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("ADD CHECK (name <> 'erased')", "the constraint orders_name_check forbids these values"),
        ("ADD UNIQUE (name)", "because of the unique index orders_name_key; write None"),
        ("ADD copy text GENERATED ALWAYS AS (name) STORED", "orders.copy is generated; leave it out"),
    ],
)
def test_constraint_that_forbids_the_new_values_is_known_before(settings: Settings, change: str, text: str) -> None:
    database.execute_sql("UPDATE orders SET name = id::text")
    database.execute_sql(f"ALTER TABLE orders {change}")
    values = {"account_id": None, "name": "erased"} | ({"copy": "x"} if "copy" in change else {})

    assert text in _refusal(settings, deciding(orders=Keep("tax law", anonymise=values)))


def test_check_that_is_not_enforced_forbids_no_values(settings: Settings, postgres_18: None) -> None:
    database.execute_sql("ALTER TABLE orders ADD CHECK (name <> 'erased') NOT ENFORCED")

    keep = Keep("tax law", anonymise={"account_id": None, "name": "erased"})
    assert erase(settings, deciding(orders=keep)).state == "done"


def test_foreign_key_with_a_period_is_refused(settings: Settings, postgres_18: None) -> None:
    database.execute_sql(
        "ALTER TABLE account ADD number int4range, ADD valid daterange, ADD UNIQUE (number, valid WITHOUT OVERLAPS);"
        "CREATE TABLE contract (id bigint PRIMARY KEY, number int4range, valid daterange,"
        " FOREIGN KEY (number, PERIOD valid) REFERENCES account (number, PERIOD valid))"
    )

    assert "contract.number is a foreign key with a PERIOD" in _refusal(settings, deciding(contract=Delete()))


def test_rows_whose_foreign_key_is_not_enforced_are_erased(settings: Settings, postgres_18: None) -> None:
    database.execute_sql(
        "CREATE TABLE visit (id bigint PRIMARY KEY, account_id bigint"
        " REFERENCES account ON DELETE CASCADE NOT ENFORCED);"
        f"INSERT INTO visit VALUES (1, {MARKER_ID})"
    )

    assert "visit" in _refusal(settings, PERSON)
    assert erase(settings, deciding(visit=Delete())).state == "done"
    assert database.execute_sql("SELECT count(*) FROM visit").fetchone() == (0,)
