"""Keys of subjects, what identifies them in the ledger, and executions that overlap."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr

from housekeeping import Delete, Keep, Settings, Subject
from tests.integration.erasure.shop import MARKER, MARKER_ID, PERSON, ask, deciding, erase, row, rows, with_key
from tests.internals.core import DatabaseUnavailable
from tests.internals.database import database
from tests.internals.erasures import Erasing, ErasureInterrupted, execute, export, ledger, request, work
from tests.internals.ledger import NOW, Run

pytestmark = pytest.mark.usefixtures("customers")


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("text", "a b"),
        ("text", "a,b"),
        ("text", " \"a\" 'b' {c} \\ %s "),
        ("uuid", "8c1f9a62-7c1b-4c3b-9f5e-2b8f6f1d0a3e"),
        ("char(6)", "ab"),
        ("bit(4)", "0101"),
        ("timestamptz", "2026-05-01 03:00:00+00"),
    ],
)
@pytest.mark.parametrize("partitioned", [False, True])
def test_key_of_any_type_erases_one_subject(settings: Settings, kind: str, key: str, partitioned: bool) -> None:
    by = " PARTITION BY LIST (id)" if partitioned else ""
    database.execute_sql(f"CREATE TABLE member (id {kind} PRIMARY KEY){by}")
    if partitioned:
        database.execute_sql("CREATE TABLE member_all PARTITION OF member DEFAULT")
    other = {"uuid": key.replace("8", "9"), "bit(4)": "0111", "timestamptz": "2026-05-01 04:00:00+00"}.get(kind, "a")
    database.execute_sql(
        f"CREATE TABLE post (id int PRIMARY KEY, member {kind} REFERENCES member); CREATE INDEX ON post (member)"
    )
    database.execute_sql("INSERT INTO member VALUES (%s), (%s)", (key, other))
    database.execute_sql("INSERT INTO post VALUES (1, %s), (2, %s)", (key, other))
    subject = Subject("member", "member", tables={"post": Delete()})
    erasing = Erasing(subject, work.find_key(subject, key)[0], [], ())
    exported = list(export(subject, erasing.reach, erasing.found, with_key(settings)))

    done = erase(settings, subject, key)

    assert (done.state, done.error, len(exported)) == ("done", None, 2)
    assert done.counts == {"member": {"deleted": 1}, "post": {"deleted": 1}}
    assert [each[0] for each in rows("post")["post"]] == [2]
    assert erase(settings, subject, key).key_hmac == done.key_hmac


@pytest.mark.parametrize("key", [("eu, west", 'the "first"'), '"eu, west","the ""first"""'])
def test_parts_of_a_composite_key_may_have_commas_and_quotes(settings: Settings, key: Any) -> None:
    database.execute_sql(
        "CREATE TABLE tenant (region text, name text, PRIMARY KEY (region, name)) PARTITION BY LIST (region);"
        "CREATE TABLE tenant_all PARTITION OF tenant DEFAULT;"
        "CREATE TABLE bill (id int PRIMARY KEY, region text, name text, FOREIGN KEY (region, name) REFERENCES tenant)"
    )
    for number, each in enumerate([("eu, west", 'the "first"'), ("eu", "second")]):
        database.execute_sql("INSERT INTO tenant VALUES (%s, %s)", each)
        database.execute_sql("INSERT INTO bill VALUES (%s, %s, %s)", (number, *each))

    done = erase(settings, Subject("tenant", "tenant", tables={"bill": Delete()}), key)

    assert (done.state, rows("tenant", "bill")) == (
        "done",
        {"tenant": [("eu", "second")], "bill": [(1, "eu", "second")]},
    )


def test_new_secret_keeps_one_erasure_of_a_subject(settings: Settings) -> None:
    """The HMAC of an erasure that has not ended, or is incomplete, is by the former secret."""
    number = ask(settings)
    changed = settings.model_copy(update={"erasure_key": SecretStr(f"{'n' * 40},{'k' * 40}")})

    assert request({"person": PERSON}, changed, "person", MARKER_ID, "operator", None) == number

    ledger.end(number, "incomplete", "1 row is left", of_runs={}, proof=None)
    again = request({"person": PERSON}, changed, "person", MARKER_ID, "operator", None)
    execute(again, changed, {"person": PERSON})

    assert (row(again).state, row(again).key_hmac) == ("done", row(number).key_hmac)


def test_failed_erasure_leaves_no_identity_in_earlier_runs(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(
        worker="shop.accounts",
        trigger="schedule",
        started_at=NOW,
        heartbeat_at=NOW,
        finished_at=NOW,
        outcome="failed",
        error=f"at {MARKER}",
    )

    def fail(*_: Any) -> Any:
        raise ValueError("no idea")

    monkeypatch.setattr(work.Erasing, "left", fail)

    assert erase(settings).state == "failed"
    assert Run.get_by_id(run.id).error == "at ***"


def test_slow_execution_does_not_overwrite_what_another_one_has_read(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second execution begins before the first one has noted the row, and continues after it was deleted."""
    subject, number, holding = deciding(item=Keep("part of the order")), ask(settings), [1]
    objects = work.Erasing.objects

    def killed(*_: Any) -> Any:
        raise DatabaseUnavailable("the database did not answer")

    def first_erases(self: Any, of: Any) -> Any:
        if holding:
            holding.pop()
            with monkeypatch.context() as patch:
                patch.setattr(work.Erasing, "left", killed)
                with pytest.raises(DatabaseUnavailable):
                    execute(number, with_key(settings), {"person": subject})
        return objects(self, of)

    monkeypatch.setattr(work.Erasing, "objects", first_erases)
    with pytest.raises(ErasureInterrupted, match="another process is executing it"):
        execute(number, with_key(settings), {"person": subject})

    execute(number, with_key(settings), {"person": subject})

    assert (row(number).state, row(number).proof["kept"]) == ("done", {"item": 8, "audit_entry": 1})
