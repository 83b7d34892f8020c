"""Erasure and export with generic relations, trees, partitions, triggers, composite keys and two databases."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

import pytest

from housekeeping import Anonymise, DeclarationError, Delete, Keep, Reference, Settings, Subject
from tests.integration.erasure.shop import ask, erase, rows, with_key
from tests.integration.several_databases import CI
from tests.integration.several_databases import two as two
from tests.internals.database import database
from tests.internals.erasures import Erasing, export, find_key, plan_erasure

pytestmark = pytest.mark.usefixtures("housekeeping_redis")

EVE: Final = 2
#: Upper and lower case, and composed or decomposed letters, name one mailbox.
MAIL_KEY: Final = "mail_key text GENERATED ALWAYS AS (lower(normalize(email, NFD))) STORED"
SCHEMA: Final = f"""
CREATE TABLE account (id bigint PRIMARY KEY, email text, {MAIL_KEY} UNIQUE, referrer_id bigint REFERENCES account,
    id_text text GENERATED ALWAYS AS (id::text) STORED);
CREATE TABLE profile (account_id bigint PRIMARY KEY REFERENCES account ON DELETE CASCADE, bio text);
CREATE TABLE address (shop int, no int, account_id bigint REFERENCES account, street text, PRIMARY KEY (shop, no));
CREATE TABLE purchase (id bigint PRIMARY KEY, account_id bigint REFERENCES account, shop int, no int, note text,
    FOREIGN KEY (shop, no) REFERENCES address);
CREATE TABLE line (purchase_id bigint REFERENCES purchase ON DELETE CASCADE, n int, packed_by bigint REFERENCES account,
    PRIMARY KEY (purchase_id, n));
CREATE TABLE line_return (id bigint PRIMARY KEY, purchase_id bigint, n int,
    FOREIGN KEY (purchase_id, n) REFERENCES line ON DELETE CASCADE);
CREATE TABLE note (id bigint PRIMARY KEY, content_type int, object_id bigint, body text);
CREATE TABLE tagged (id bigint PRIMARY KEY, content_type int, object_id text);
CREATE TABLE media (id bigint PRIMARY KEY, owner_id bigint REFERENCES account ON DELETE CASCADE);
CREATE TABLE photo (media_ptr_id bigint PRIMARY KEY REFERENCES media ON DELETE CASCADE, place text);
CREATE TABLE comment (id bigint PRIMARY KEY, author_id bigint REFERENCES account, media_id bigint REFERENCES media,
    parent_id bigint REFERENCES comment ON DELETE CASCADE, body text);
CREATE TABLE vote (id bigint PRIMARY KEY, comment_id bigint REFERENCES comment ON DELETE CASCADE);
CREATE TABLE message (id bigint PRIMARY KEY, sender_id bigint REFERENCES account,
    recipient_id bigint REFERENCES account, body text);
CREATE TABLE event (id bigint, at date, account_id bigint REFERENCES account, PRIMARY KEY (id, at))
    PARTITION BY RANGE (at);
CREATE TABLE event_2025 PARTITION OF event FOR VALUES FROM ('2025-01-01') TO ('2026-01-01');
CREATE TABLE event_2026 PARTITION OF event FOR VALUES FROM ('2026-01-01') TO ('2027-01-01');
CREATE TABLE audit (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, account_id bigint, old jsonb);
CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO audit (account_id, old) VALUES (OLD.id, to_jsonb(OLD)); RETURN NULL; END $$;
CREATE TRIGGER audit AFTER UPDATE OR DELETE ON account FOR EACH ROW EXECUTE FUNCTION audit();
CREATE TABLE newsletter (email text PRIMARY KEY, {MAIL_KEY});
INSERT INTO account (id, email, referrer_id) VALUES (1, 'bob@example.com', NULL),
    (2, 'Zoe\u0308@Example.com', 1), (3, 'al@example.com', 2);
INSERT INTO profile VALUES (1, 'b'), (2, 'e');
INSERT INTO address VALUES (1, 1, 1, 'b'), (1, 2, 2, 'e');
INSERT INTO purchase VALUES (1, 1, 1, 1, 'b'), (2, 2, 1, 2, 'e'), (3, 2, 1, 2, 'e');
INSERT INTO line SELECT p, n, 1 + n %% 2 FROM generate_series(1, 3) AS p, generate_series(1, 2) AS n;
INSERT INTO line_return SELECT p, p, 1 FROM generate_series(1, 3) AS p;
INSERT INTO note VALUES (1, 7, 2, 'on eve'), (2, 8, 2, 'on a purchase'), (3, 7, 1, 'on bob'),
    (4, 8, 1, 'on that of bob');
INSERT INTO tagged VALUES (1, 7, '2'), (2, 7, '1'), (3, 9, 'x2');
INSERT INTO media VALUES (1, 1), (2, 2); INSERT INTO photo VALUES (1, 'b'), (2, 'e');
INSERT INTO comment VALUES (1, 2, 1, NULL, 'eve'), (2, 1, 1, 1, 'bob'), (3, 1, 2, NULL, 'bob'), (4, 2, 2, 3, 'eve'),
    (5, NULL, 2, 4, 'a guest'), (6, 1, 1, NULL, 'bob');
INSERT INTO vote SELECT n, n FROM generate_series(1, 6) AS n;
INSERT INTO message VALUES (1, 2, 1, 'e'), (2, 1, 2, 'b'), (3, 2, 2, 'to herself'), (4, 1, 3, 'b');
INSERT INTO event SELECT n, date '2025-12-29' + n, 1 + n %% 3 FROM generate_series(1, 6) AS n;
INSERT INTO newsletter (email) VALUES ('ZO\u00cb@example.com'), ('bob@example.com')
"""
INVOICES: Final = """
CREATE TABLE invoice (id bigint PRIMARY KEY, purchase_id bigint, customer text);
CREATE TABLE dunning (id bigint PRIMARY KEY, invoice_id bigint NOT NULL REFERENCES invoice);
INSERT INTO invoice SELECT n, n, 'c' FROM generate_series(1, 3) AS n; INSERT INTO dunning SELECT id, id FROM invoice
"""
PERSON: Final = Subject(
    "person",
    "account",
    tables={
        **dict.fromkeys(["profile", "address", "note", "tagged", "media", "photo", "vote", "event", "audit"], Delete()),
        **dict.fromkeys(["newsletter", "line.purchase_id", "line_return", "dunning", "comment.media_id"], Delete()),
        "account.referrer_id": Anonymise(referrer_id=None),
        "purchase": Keep("tax law", anonymise={"account_id": None, "shop": None, "no": None, "note": ""}),
        "line.packed_by": Keep("who packed it", anonymise={"packed_by": None}),
        "comment.author_id": Anonymise(author_id=None, body="[erased]"),
        "comment.parent_id": Delete(),
        "message.sender_id": Anonymise(sender_id=None, body="[erased]"),
        "message.recipient_id": Anonymise(recipient_id=None),
        "invoice": Keep("tax law", anonymise={"customer": ""}),
    },
    references=[
        Reference("note.object_id", "account.id", where="content_type = 7"),
        Reference("note.object_id", "purchase.id", where="content_type = 8"),
        Reference("tagged.object_id", "account.id_text", where="content_type = 7"),
        Reference("audit.account_id", "account.id"),
        Reference("newsletter.mail_key", "account.mail_key"),
        Reference("invoice.purchase_id", "purchase.id", database=CI),
    ],
    by="mail_key",
)


@pytest.fixture
def shop(two: Settings) -> Settings:
    database.execute_sql(SCHEMA)
    with database.using(CI):
        database.execute_sql(INVOICES)
    return two


def test_everything_is_changed_as_decided_and_counted_as_planned(
    shop: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    planned = plan_erasure(Erasing(PERSON, [str(EVE)], [], ()), "")

    done = erase(shop, PERSON, EVE)

    assert (done.state, done.error) == ("done", None)
    changed = {name: sum(each.values()) for name, each in done.counts.items()}
    assert changed.pop("audit") == 1  # the trigger has written it; the second pass finds it
    expected: dict[str, int] = {}
    for each in planned.links:
        expected[each.table] = expected.get(each.table, 0) + each.rows
    assert changed == {name: number for name, number in expected.items() if number}
    assert done.counts["message"] == {"anonymised": 3}  # the one to herself is one
    assert done.counts["comment"] == {"anonymised": 1, "deleted": 4}
    assert not [each for each in caplog.records if each.message == "Deleted rows are referenced"]
    assert rows("message", "comment", "account", "audit", "newsletter", "tagged", "note", "line", "line_return") == {
        "message": [(1, None, 1, "[erased]"), (2, 1, None, "b"), (3, None, None, "[erased]"), (4, 1, 3, "b")],
        "comment": [(1, None, 1, None, "[erased]"), (6, 1, 1, None, "bob")],
        "account": [
            (1, "bob@example.com", "bob@example.com", None, "1"),
            (3, "al@example.com", "al@example.com", None, "3"),
        ],
        "audit": [(1, 3, rows("audit")["audit"][0][2])],
        "newsletter": [("bob@example.com", "bob@example.com")],
        "tagged": [(2, 7, "1"), (3, 9, "x2")],
        "note": [(3, 7, 1, "on bob"), (4, 8, 1, "on that of bob")],
        "line": [(1, 1, None), (1, 2, 1)],
        "line_return": [(1, 1, 1)],
    }


def test_export_has_no_rows_of_others_that_would_be_deleted_along(shop: Settings) -> None:
    """Comments 2 and 3 have other authors. Comment 5 has no author, and Eve bought what others packed."""
    erasing = Erasing(PERSON, [str(EVE)], [], ())

    lines = [json.loads(each) for each in export(PERSON, erasing.reach, erasing.found, with_key(shop))]

    found: dict[str, list[Any]] = {}
    for each in lines:
        found.setdefault(each["table"], []).append(list(each["row"].values())[0])
    assert found.pop("event") and found == {
        "account": [2],
        "profile": [2],
        "address": [1],
        "purchase": [2, 3],
        "line": [1, 2, 2, 3, 3],
        "line_return": [2, 3],
        "note": [1, 2],
        "tagged": [1],
        "media": [2],
        "photo": [2],
        "comment": [1, 4, 5],
        "vote": [1, 4, 5],
        "message": [1, 2, 3],
        "newsletter": ["ZO\u00cb@example.com"],
        "invoice": [2, 3],
        "dunning": [2, 3],
    }


@pytest.mark.parametrize("key", ["zoe\u0308@example.com", EVE])
def test_mail_is_found_by_its_normalized_form(shop: Settings, key: Any) -> None:
    assert find_key(PERSON, key) == ([str(EVE)], True)
    assert ask(shop, PERSON, key) == ask(shop, PERSON, EVE)


def test_reference_of_text_to_a_number_names_a_column_of_text(shop: Settings) -> None:
    references = [Reference("tagged.object_id", "account.id", where="content_type = 7")]

    with pytest.raises(DeclarationError) as refused:
        Erasing(replace(PERSON, references=references), [str(EVE)], [], ())

    text = "ALTER TABLE account ADD id_text text GENERATED ALWAYS AS (id::text) STORED, and refer to id_text"
    assert str(refused.value).endswith(f"operator does not exist: text = bigint; {text}")
