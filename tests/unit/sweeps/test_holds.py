"""Holds that hold fewer rows than their author means are rejected where they are declared, without a database."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from peewee import BigAutoField, BigIntegerField, BooleanField, PostgresqlDatabase

from housekeeping import BaseModel, Delete, Rows, Sweep, UtcDateTimeField
from tests.declarations import stage_of
from tests.internals.core import DeclarationError
from tests.internals.sweeps import held_condition, hold_of_another_table, is_not_held


class Document(BaseModel):
    id = BigAutoField()
    user_id = BigIntegerField()
    on_hold = BooleanField()
    expires_at = UtcDateTimeField()


class OldDocument(BaseModel):
    id = BigAutoField()


class LegalHold(BaseModel):
    user_id = BigIntegerField()
    released = BooleanField()


NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)


def declared(hold: Callable[..., Any]) -> Sweep:
    rows = Rows(Document, stale=lambda row, now: row.expires_at <= now, order="expires_at", hold=hold, action=Delete())
    return Sweep("shop.documents", rows)


def in_sql(node: Any) -> str:
    sql, _ = PostgresqlDatabase(None).get_sql_context().sql(node).query()
    return str(sql)


def test_hold_gets_the_time_that_the_predicate_gets() -> None:
    rows = Rows(
        Document,
        stale=lambda row, now: row.expires_at <= now,
        age=timedelta(days=1),
        hold=lambda row, now: row.expires_at > now,
        order="expires_at",
        action=Delete(),
    )

    condition = stage_of(Sweep("shop.documents", rows)).stale(NOW)

    assert PostgresqlDatabase(None).get_sql_context().sql(condition).query()[1] == [NOW - timedelta(days=1)] * 2


def test_hold_applies_to_another_table_with_its_columns() -> None:
    hold = hold_of_another_table(
        lambda now: (LegalHold.user_id == Document.user_id) | Document.on_hold, Document, OldDocument
    )

    statement = in_sql(OldDocument.select(OldDocument.id).where(is_not_held(held_condition(hold, OldDocument, NOW))))

    assert statement.endswith(
        'FROM "old_document" AS "t1" WHERE (NOT EXISTS(SELECT 1 FROM "legal_hold" AS "t2" WHERE ("t2"."user_id" = '
        '"t1"."user_id")) AND (("t1"."on_hold") IS NOT TRUE))'
    )


@pytest.mark.parametrize(
    ("hold", "text"),
    [
        (
            lambda row: True,
            "hold returns True; write a condition on columns: lambda row: row.on_hold",
        ),
        (lambda row: None, "hold returns None; write a condition"),
        (lambda row: row.on_hold and row.user_id == 1, "hold uses and, or, not, in, if or a chained comparison"),
        (lambda row: (row.user_id > 3) & row.on_hold == True, "hold compares a condition with True"),  # noqa: E712
        (
            lambda row: (LegalHold.user_id == row.user_id) & (LegalHold.released | row.on_hold),
            "hold joins by | conditions on different tables within another condition",
        ),
        (
            lambda row: ~((LegalHold.user_id == row.user_id) & row.on_hold),
            "hold joins by | conditions on different tables within another condition",
        ),
        (
            lambda row: row.on_hodl,
            "hold reads row.on_hodl, but Document has no column 'on_hodl'",
        ),
        (lambda: Document.on_hold, "Rows: hold is called with a row and the time; write lambda row: row.on_hold"),
        (Document.on_hold, "Rows: hold is an object of type"),
        (7, "Rows: hold is 7; write a function"),
    ],
)
def test_wrong_hold_is_rejected_with_what_to_write(hold: Any, text: str) -> None:
    with pytest.raises(DeclarationError) as refused:
        declared(hold)

    assert text in str(refused.value)
    assert "\n" not in str(refused.value)
