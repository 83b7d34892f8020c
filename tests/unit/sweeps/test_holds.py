"""Holds that hold fewer rows than their author means are rejected where they are declared, without a database."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from peewee import BigAutoField, BigIntegerField, BooleanField, PostgresqlDatabase, fn

from housekeeping.core.errors import DeclarationError
from housekeeping.sweeps import BaseModel, Delete, Sweep, TableStage, UtcDateTimeField
from housekeeping.sweeps.stages.hold import held_condition, hold_of_another_table, is_not_held


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


def declared(hold: Callable[..., Any], **given: Any) -> Sweep:
    return Sweep(
        name="shop.documents",
        stale=lambda now: Document.expires_at <= now,
        hold=hold,
        order=(Document.expires_at, Document.id),
        action=Delete(),
        **given,
    )


def stage_of(sweep: Sweep) -> TableStage:
    (stage,) = sweep.declared_stages()
    assert isinstance(stage, TableStage)
    return stage


def in_sql(node: Any) -> str:
    sql, _ = PostgresqlDatabase(None).get_sql_context().sql(node).query()
    return str(sql)


@pytest.mark.parametrize(
    ("hold", "sql"),
    [
        (
            lambda: LegalHold.user_id == Document.user_id,
            'NOT EXISTS(SELECT 1 FROM "legal_hold" AS "t2" WHERE ("t2"."user_id" = "t1"."user_id"))',
        ),
        (
            lambda: (LegalHold.user_id == Document.user_id) & ~LegalHold.released,
            'NOT EXISTS(SELECT 1 FROM "legal_hold" AS "t2" WHERE (("t2"."user_id" = "t1"."user_id") AND NOT '
            '"t2"."released"))',
        ),
        (lambda: Document.on_hold, '("t1"."on_hold" IS NOT TRUE)'),
        (
            lambda: (LegalHold.user_id == Document.user_id) | Document.on_hold,
            '(NOT EXISTS(SELECT 1 FROM "legal_hold" AS "t2" WHERE ("t2"."user_id" = "t1"."user_id")) AND '
            '("t1"."on_hold" IS NOT TRUE))',
        ),
        (
            lambda: fn.exists(LegalHold.select(LegalHold.user_id)),
            'NOT exists(SELECT "t2"."user_id" FROM "legal_hold" AS "t2")',
        ),
    ],
)
def test_hold_is_part_of_the_predicate_in_sql(hold: Callable[[], Any], sql: str) -> None:
    stage = stage_of(declared(hold))

    statement = in_sql(Document.select(Document.id).where(stage.stale(NOW)))

    assert statement.endswith(f'WHERE (("t1"."expires_at" <= %s) AND {sql})')


def test_hold_applies_to_another_table_with_its_columns() -> None:
    hold = hold_of_another_table(
        lambda: (LegalHold.user_id == Document.user_id) | Document.on_hold, Document, OldDocument
    )

    statement = in_sql(OldDocument.select(OldDocument.id).where(is_not_held(held_condition(hold, OldDocument))))

    assert statement.endswith(
        'FROM "old_document" AS "t1" WHERE (NOT EXISTS(SELECT 1 FROM "legal_hold" AS "t2" WHERE ("t2"."user_id" = '
        '"t1"."user_id")) AND ("t1"."on_hold" IS NOT TRUE))'
    )


def test_copy_of_a_stage_has_its_hold_once() -> None:
    stage = stage_of(declared(lambda: Document.on_hold))

    assert in_sql(replace(stage, batch_size=7).stale(NOW)).count("on_hold") == 1
    assert in_sql(is_not_held(held_condition(lambda: Document.on_hold, Document))).endswith("IS NOT TRUE)")


@pytest.mark.parametrize(
    ("hold", "text"),
    [
        (lambda: True, "hold returns True; write a condition on columns: lambda: LegalHold.user_id == Session.user_id"),
        (lambda: None, "hold returns None; write a condition"),
        (lambda: Document.on_hold and Document.user_id == 1, "hold uses and, or, not, in, if or a chained comparison"),
        (lambda: (Document.user_id > 3) & Document.on_hold == True, "hold compares a condition with True"),  # noqa: E712
        (
            lambda: (LegalHold.user_id == Document.user_id) & (LegalHold.released | Document.on_hold),
            "hold joins by | conditions on different tables within another condition",
        ),
        (
            lambda: ~((LegalHold.user_id == Document.user_id) & Document.on_hold),
            "hold joins by | conditions on different tables within another condition",
        ),
        (lambda now: Document.on_hold, "hold is called without an argument"),
        (Document.on_hold, "hold is an object of type"),
    ],
)
def test_wrong_hold_is_rejected_with_what_to_write(hold: Any, text: str) -> None:
    with pytest.raises(DeclarationError) as refused:
        declared(hold)

    assert text in str(refused.value) and str(refused.value).startswith("shop.documents: ")
    assert "\n" not in str(refused.value)


def test_hold_that_fails_is_checked_when_the_sweep_is_used() -> None:
    sweep = declared(lambda: Document.on_hodl)  # type: ignore[attr-defined]

    with pytest.raises(DeclarationError, match="shop.documents: stale or hold fails: AttributeError: .*on_hodl"):
        sweep.stages_for_run()


def test_hold_of_a_sweep_of_stages_is_rejected() -> None:
    stages: Any = lambda sweep: [stage_of(declared(lambda: Document.on_hold))]  # noqa: E731

    with pytest.raises(DeclarationError, match="a sweep of stages has no hold; give it to each TableStage"):
        Sweep(name="shop.staged", stages=stages, hold=lambda: Document.on_hold)


@pytest.mark.parametrize(
    ("hold", "text"),
    [
        (lambda row: row.on_hodl, "shop.named: hold: Document has no column 'on_hodl'; its columns are id, user_id"),
        (lambda: Document.on_hold, "shop.named: hold is called with a row"),
        (lambda row: False, "shop.named: hold returns False; write a condition on columns: lambda row: row.on_hold"),
        (7, "shop.named: hold should be a function of a row: lambda row: row.on_hold"),
    ],
)
def test_wrong_hold_by_column_names_is_rejected(hold: Any, text: str) -> None:
    with pytest.raises(DeclarationError) as refused:
        Sweep.on(
            Document, name="shop.named", stale=lambda row, now: row.expires_at <= now, hold=hold, action=Delete()
        ).stages_for_run()

    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_rows_per_s": 0}, "max_rows_per_s must be above 0, or None for no limit"),
        ({"rest": -0.1}, "rest must be 0 or more; 1 pauses as long as a batch takes"),
        ({"rest": None}, "rest is None; write a number, such as 0.5"),
    ],
)
def test_wrong_pace_is_rejected(given: dict[str, Any], text: str) -> None:
    with pytest.raises(DeclarationError, match=text):
        declared(lambda: Document.on_hold, **given)
