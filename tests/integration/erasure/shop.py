"""Tables of a shop with two customers, and the declaration that erases one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import redis
from pydantic import SecretStr

from housekeeping import Anonymise, Delete, Keep, Reference, Settings, Subject, Sweep
from tests.internals.database import database
from tests.internals.erasures import Erasure, execute, request

#: What identifies the person that is erased; their id is MARKER_ID.
MARKER: Final = "zaphod@example.org"
MARKER_ID: Final = 471147

TABLES: Final = """
CREATE TABLE account (id bigint PRIMARY KEY, email text UNIQUE);
CREATE TABLE session (id bigint PRIMARY KEY, account_id bigint NOT NULL REFERENCES account ON DELETE CASCADE);
CREATE TABLE orders (id bigint PRIMARY KEY, account_id bigint REFERENCES account, email text, name text NOT NULL);
CREATE TABLE item (id bigint PRIMARY KEY, order_id bigint NOT NULL REFERENCES orders ON DELETE CASCADE, note text);
CREATE TABLE comment (id bigint PRIMARY KEY, author_id bigint REFERENCES account ON DELETE SET NULL, text varchar(20),
    parent_id bigint REFERENCES comment);
CREATE TABLE attachment (id bigint PRIMARY KEY, owner_type text, owner_id bigint, name text);
CREATE TABLE newsletter (id bigint PRIMARY KEY, email text);
CREATE TABLE audit_entry (id bigint PRIMARY KEY, account_id bigint);
CREATE INDEX ON session (account_id); CREATE INDEX ON orders (account_id); CREATE INDEX ON item (order_id);
CREATE INDEX ON comment (author_id); CREATE INDEX ON comment (parent_id)
"""
ROWS: Final = """
INSERT INTO account VALUES (%(id)s, %(mail)s), (1, 'other@example.org');
INSERT INTO session SELECT n, CASE WHEN n <= 5 THEN %(id)s ELSE 1 END FROM generate_series(1, 8) AS n;
INSERT INTO orders SELECT n, CASE WHEN n <= 4 THEN %(id)s ELSE 1 END, CASE WHEN n <= 4 THEN %(mail)s ELSE 'o' END,
    CASE WHEN n <= 4 THEN %(mail)s ELSE 'o' END FROM generate_series(1, 6) AS n;
INSERT INTO item SELECT n, 1 + (n - 1) / 2, CASE WHEN n <= 8 THEN %(mail)s ELSE 'o' END
    FROM generate_series(1, 12) AS n;
INSERT INTO comment VALUES (1, %(id)s, %(mail)s, NULL), (2, 1, 'a reply', 1), (3, %(id)s, %(mail)s, 2),
    (4, 1, 'alone', NULL);
INSERT INTO attachment VALUES (1, 'Account', %(id)s, %(mail)s), (2, 'Account', 1, 'o'), (3, 'Order', %(id)s, 'o');
INSERT INTO newsletter VALUES (1, %(mail)s), (2, 'other@example.org');
INSERT INTO audit_entry VALUES (1, %(id)s), (2, 1)
"""
NAMES: Final = ("account", "session", "orders", "item", "comment", "attachment", "newsletter", "audit_entry")

PERSON: Final = Subject(
    "person",
    "account",
    tables={
        "session": Delete(),
        "orders": Keep("tax law: 10 years", anonymise={"account_id": None, "email": None, "name": "erased"}),
        "item": Delete(),
        "comment.author_id": Anonymise(author_id=None, text="[erased]"),
        "comment.parent_id": Keep("replies of others"),
        "attachment": Delete(),
        "newsletter": Delete(),
        "audit_entry": Keep("security log"),
    },
    references=[
        Reference("attachment.owner_id", "account.id", where="owner_type = 'Account'"),
        Reference("newsletter.email", "account.email"),
        Reference("audit_entry.account_id", "account.id"),
    ],
    by="email",
)


def deciding(subject: Subject = PERSON, **decisions: Any) -> Subject:
    """Return the subject with other decisions; None removes one, and ``__`` is a point in a name."""
    given = {name.replace("__", "."): decision for name, decision in decisions.items()}
    tables = {name: each for name, each in {**subject.tables, **given}.items() if each is not None}
    return replace(subject, tables=tables)


def create() -> None:
    database.execute_sql(TABLES)
    database.execute_sql(ROWS, {"id": MARKER_ID, "mail": MARKER})


def rows(*tables: str) -> dict[str, list[Any]]:
    """Return the rows of these tables, by default of all."""
    return {each: database.execute_sql(f"SELECT * FROM {each} ORDER BY 1").fetchall() for each in tables or NAMES}


#: The tables after the erasure.
ERASED: Final = {
    "account": [(1, "other@example.org")],
    "session": [(6, 1), (7, 1), (8, 1)],
    "orders": [*((n, None, None, "erased") for n in range(1, 5)), (5, 1, "o", "o"), (6, 1, "o", "o")],
    "item": [(9, 5, "o"), (10, 5, "o"), (11, 6, "o"), (12, 6, "o")],
    "comment": [(1, None, "[erased]", None), (2, 1, "a reply", 1), (3, None, "[erased]", 2), (4, 1, "alone", None)],
    "attachment": [(2, "Account", 1, "o"), (3, "Order", MARKER_ID, "o")],
    "newsletter": [(2, "other@example.org")],
    "audit_entry": [(1, MARKER_ID), (2, 1)],
}


def forget(key: str) -> None:
    """Another system, which forgets the person."""


def dump_redis(client: redis.Redis) -> str:
    """Return all keys and values."""
    read: Any = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"set": client.smembers,
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"stream": client.xrange,
    }
    return "\n".join(f"{key!r} {read[client.type(key)](key)!r}" for key in client.scan_iter())


def with_key(settings: Settings, **changes: Any) -> Settings:
    return settings.model_copy(update={"erasure_key": SecretStr("k" * 40), **changes})


def ask(settings: Settings, subject: Subject = PERSON, key: Any = MARKER_ID) -> int:
    """Request an erasure."""
    return request({subject.name: subject}, with_key(settings), subject.name, key, "operator", "of May")


def erase(settings: Settings, subject: Subject = PERSON, key: Any = MARKER_ID, sweeps: Sequence[Sweep] = ()) -> Any:
    """Request an erasure, execute it, and return its row."""
    number = ask(settings, subject, key)
    execute(number, with_key(settings), {subject.name: subject}, sweeps)
    return row(number)


def row(number: int) -> Any:
    """Return the row of an erasure."""
    return Erasure.get_by_id(number)
