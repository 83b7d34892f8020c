"""An erasure from its request to its receipt."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from housekeeping import Anonymise, Delete, Keep, Reference, Settings, Subject
from tests.integration.erasure.shop import ERASED, MARKER, MARKER_ID, PERSON, ask, erase, row, rows, with_key
from tests.internals.database import database
from tests.internals.erasures import export, find_erasure, verified, work

pytestmark = pytest.mark.usefixtures("customers")


@pytest.mark.parametrize("key", [MARKER_ID, str(MARKER_ID), MARKER])
def test_rows_are_deleted_kept_and_anonymised_as_decided(settings: Settings, key: object) -> None:
    done = erase(settings, key=key)

    assert (done.state, done.error) == ("done", None)
    assert rows() == ERASED


def test_receipt_has_counts_reasons_and_the_proof_and_no_key(settings: Settings) -> None:
    done = erase(settings)

    assert done.counts == {
        "account": {"deleted": 1},
        "session": {"deleted": 5},
        "orders": {"anonymised": 4},
        "item": {"deleted": 8},
        "comment": {"anonymised": 2},
        "attachment": {"deleted": 1},
        "newsletter": {"deleted": 1},
    }
    assert done.kept == {
        "orders": "tax law: 10 years",
        "comment": "replies of others",
        "audit_entry": "security log",
    }
    checked = dict.fromkeys(name for name in ERASED if name != "audit_entry")
    assert done.proof == {"passes": 1, "left": dict.fromkeys(checked, 0), "kept": {"audit_entry": 1}}
    assert (done.key, done.found, done.requester, done.reason) == (None, None, "operator", "of May")
    assert done.requested_at <= done.started_at <= done.ended_at
    assert MARKER not in str(done.__data__) and str(MARKER_ID) not in str(done.__data__)


@pytest.mark.parametrize(
    ("kept", "shown", "words"),
    [
        ({}, "kept 1", "nothing is left in 7 tables; kept: 1 row of audit_entry (security log)"),
        # Rows of items, whose order no longer leads to the person.
        (
            {"item": Keep("part of the order")},
            "kept 8",
            "nothing is left in 6 tables; kept: 8 rows of item (part of the order), "
            "1 row of audit_entry (security log)",
        ),
        # The same row by two links is one.
        (
            {"audit_entry.by": Keep("who wrote it")},
            "kept 2",
            "nothing is left in 7 tables; kept: 2 rows of audit_entry (who wrote it)",
        ),
    ],
)
def test_proof_does_not_count_a_table_that_keeps_rows(
    settings: Settings, kept: dict[str, Any], shown: str, words: str
) -> None:
    database.execute_sql("ALTER TABLE audit_entry ADD by bigint, ADD kind text DEFAULT 'x'")
    database.execute_sql("UPDATE audit_entry SET by = %s WHERE id < 3", (MARKER_ID,))
    references = [Reference("audit_entry.by", "account.id", where="kind = 'x'")] if "audit_entry.by" in kept else []
    subject = replace(PERSON, tables={**PERSON.tables, **kept}, references=[*PERSON.references, *references])

    secret = with_key(settings).require_erasure_key()
    done = find_erasure(str(erase(settings, subject).id))

    assert (done.state, done.proof_in_words) == ("done", words)
    assert done.counts_in_words(next(iter(kept), "audit_entry").partition(".")[0]) == shown
    assert done.counts_in_words("orders") == "anonymised 4"
    assert verified(json.dumps(done.receipt(secret)), secret)["proof"] == done.proof


def test_kept_rows_do_not_include_those_that_another_link_deletes(settings: Settings) -> None:
    database.execute_sql("ALTER TABLE newsletter ADD sent_by bigint")
    database.execute_sql("UPDATE newsletter SET sent_by = %s", (MARKER_ID,))
    references = [*PERSON.references, Reference("newsletter.sent_by", "account.id")]
    decided = {**PERSON.tables, "newsletter": Delete(), "newsletter.sent_by": Keep("who sent it")}

    done = erase(settings, replace(PERSON, tables=decided, references=references))

    assert (done.state, done.proof["kept"]["newsletter"]) == ("done", 1)
    assert rows("newsletter") == {"newsletter": [(2, "other@example.org", MARKER_ID)]}


def test_kept_rows_are_unknown_once_the_subject_is_gone(settings: Settings) -> None:
    subject = replace(PERSON, tables={**PERSON.tables, "item": Keep("part of the order")})

    first, second = erase(settings, subject), erase(settings, subject)

    assert (first.proof["kept"], second.proof["kept"]) == (
        {"item": 8, "audit_entry": 1},
        dict.fromkeys(first.proof["kept"]),
    )
    words = find_erasure(str(second.id)).proof_in_words
    assert "kept: rows of item (part of the order), rows of audit_entry (security log)" in words


def test_names_with_spaces_and_percent_signs(settings: Settings) -> None:
    database.execute_sql("""
    CREATE DOMAIN "k%%s" AS bigint; CREATE DOMAIN "t%%s" AS text;
    CREATE TABLE "our members" (id "k%%s" PRIMARY KEY, "the mail" "t%%s" UNIQUE);
    CREATE TABLE "their posts" (id "k%%s" PRIMARY KEY, "written by" "k%%s" REFERENCES "our members", body "t%%s");
    CREATE TABLE "any note" (id "k%%s" PRIMARY KEY, "of post" "k%%s");
    INSERT INTO "our members" VALUES (1, 'a%%b'), (2, 'c');
    INSERT INTO "their posts" VALUES (3, 1, 'x'), (4, 2, 'y'); INSERT INTO "any note" VALUES (5, 3), (6, 4)
    """)
    member = Subject(
        "member",
        '"our members"',
        tables={'"their posts"': Anonymise(**{"written by": None, "body": "100%"}), '"any note".of post': Delete()},
        references=[Reference('"any note".of post', '"their posts".id')],
        by="the mail",
    )

    done = erase(settings, member, "a%b")

    assert (done.state, done.error) == ("done", None)
    assert list(rows('"our members"', '"their posts"', '"any note"').values()) == [
        [(2, "c")],
        [(3, None, "100%"), (4, 2, "y")],
        [(6, 4)],
    ]


def test_decision_of_an_exported_row_is_not_that_of_rows_of_others_that_refer_to_it(settings: Settings) -> None:
    database.execute_sql("ALTER TABLE account ADD invited_by bigint REFERENCES account")
    database.execute_sql("UPDATE account SET invited_by = %s WHERE id = 1", (MARKER_ID,))
    subject = replace(PERSON, tables={**PERSON.tables, "account.invited_by": Anonymise(invited_by=None)})
    erasing = work.Erasing(subject, [str(MARKER_ID)], [], ())

    lines = [json.loads(each) for each in export(subject, erasing.reach, erasing.found, with_key(settings))]

    found = {(each["table"], each["decision"]) for each in lines}
    assert found >= {("account", "delete"), ("comment", "anonymise"), ("orders", "anonymise"), ("audit_entry", "keep")}
    assert len(found) == len({each["table"] for each in lines})


def test_erased_twice_changes_nothing(settings: Settings) -> None:
    first = erase(settings)

    second = erase(settings)

    assert (second.id > first.id, second.state, second.counts, second.key_hmac) == (True, "done", {}, first.key_hmac)
    assert rows() == ERASED


def test_request_of_an_unfinished_erasure_is_the_same(settings: Settings) -> None:
    assert ask(settings) == ask(settings, key=MARKER)
    assert row(ask(settings)).state == "requested"


def test_condition_of_a_reference_to_the_same_table_limits_what_is_deleted(settings: Settings) -> None:
    database.execute_sql(
        "CREATE TABLE note (id bigint PRIMARY KEY, owner bigint REFERENCES account, parent bigint, kind text);"
        "CREATE INDEX ON note (owner); CREATE INDEX ON note (parent);"
        "CREATE TABLE upload (id bigint PRIMARY KEY, note_id bigint REFERENCES note); CREATE INDEX ON upload (note_id);"
    )
    database.execute_sql("INSERT INTO note VALUES (1, %s, NULL, 'note')", (MARKER_ID,))
    database.execute_sql("INSERT INTO note VALUES (2, NULL, 1, 'copy'), (3, NULL, 1, 'reply'), (4, NULL, 2, 'copy')")
    database.execute_sql("INSERT INTO upload SELECT id, id FROM note")
    decided = {**PERSON.tables, "note": Delete(), "upload": Anonymise(note_id=None)}
    copies = Reference("note.parent", "note.id", where="kind = 'copy'")

    done = erase(settings, replace(PERSON, tables=decided, references=[*PERSON.references, copies]))

    assert (done.state, done.error) == ("done", None)
    assert list(rows("note", "upload").values()) == [[(3, None, 1, "reply")], [(1, None), (2, None), (3, 3), (4, None)]]
