"""Predicates that match more than their author means are rejected where they are declared, without a database."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

import pytest
from peewee import SQL, BigAutoField, BooleanField, Case, DateField, ForeignKeyField, IntegerField, TextField, fn

from housekeeping import BaseModel, Delete, Rows, StateMachine, Sweep, Transition, UtcDateTimeField
from tests.declarations import changed, only, stage_of
from tests.internals.core import DeclarationError
from tests.internals.sweeps import takes_time
from tests.internals.workers import BUILT_IN


class Shop(BaseModel):
    id = BigAutoField()
    closed_at = UtcDateTimeField(null=True)


class Draft(BaseModel):
    id = BigAutoField()
    shop = ForeignKeyField(Shop)
    state = TextField()
    archived = BooleanField()
    weight = IntegerField()
    day = DateField()
    touched_at = UtcDateTimeField()


class State(StrEnum):
    OPEN = "open"
    DROPPED = "dropped"


YEAR: Final = datetime(2026, 1, 1, tzinfo=UTC)
USELESS: Final = SQL("TRUE")
machine: Final = StateMachine(Draft.state, State, {"drop": ([State.OPEN], State.DROPPED)})


def declared(stale: Callable[..., Any], **given: Any) -> Sweep:
    return Sweep("shop.drafts", Rows(Draft, stale=stale, order="touched_at", **{"action": Delete(), **given}))


def refusal(stale: Callable[..., Any], **given: Any) -> str:
    with pytest.raises(DeclarationError) as refused:
        declared(stale, **given)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def older(row: Any, limit: datetime) -> Any:
    return row.touched_at < limit


def forgets_a_column(row: Any, now: datetime) -> Any:
    _ = row.state == "draft"
    return older(row, now)


def joins_in_a_helper(row: Any, now: datetime) -> Any:
    return _both(row.state == "draft", older(row, now))


def _both(first: Any, second: Any) -> Any:
    return first and second


TIMELESS: Final[list[Callable[..., Any]]] = [
    lambda row, now: USELESS,
    lambda row, now: row.id > 0,
    lambda row, now: row.state == "draft",
    lambda row, now: SQL("touched_at < now()"),
    lambda row, now: row.touched_at < fn.NOW(),
    lambda row, now: row.touched_at < YEAR,
]
EVALUATED_BY_PYTHON: Final[list[Callable[..., Any]]] = [
    lambda row, now: row.state == "draft" and row.touched_at < now,
    lambda row, now: row.touched_at < now and row.state == "draft",
    lambda row, now: row.touched_at < now or row.state == "draft",
    lambda row, now: row.archived and row.touched_at < now,
    lambda row, now: (row.touched_at < now) & (not row.archived),
    lambda row, now: not (row.touched_at >= now),
    lambda row, now: now - timedelta(days=9) < row.touched_at < now,
    lambda row, now: (row.touched_at < now) & (row.state in ("draft", "open")),
    lambda row, now: all([row.state == "draft", row.touched_at < now]),
    joins_in_a_helper,
]
ACCEPTED: Final[list[Callable[..., Any]]] = [
    lambda row, now: (row.state == "draft") & (row.touched_at < now),
    lambda row, now: (row.state == "draft") | ~(row.touched_at >= now),
    lambda row, now: row.archived & (row.touched_at < now),
    lambda row, now: ~row.archived & row.touched_at.between(now - timedelta(days=9), now),
    lambda row, now: row.state.in_(["draft", "open"]) & (row.day < now.date()),
    lambda row, now: (row.touched_at < now) & row.shop.in_(Shop.select(Shop.id).where(Shop.closed_at.is_null(False))),
    lambda row, now: fn.EXISTS(Shop.select(SQL("1")).where((Shop.id == row.shop) & (Shop.closed_at < now))),
    lambda row, now: (row.shop_id == 7) & (row.touched_at < now),
    lambda row, now: fn.COALESCE(row.touched_at, now) < now,
    lambda row, now: Case(None, [(row.archived, row.touched_at)], row.day) < now,
    lambda row, now: row.state.contains("a_b") & (row.touched_at.cast("date") < now),
    lambda row, now: SQL("touched_at < %s", [now]),
    lambda row, now: SQL(f"{row.state.column_name} = 'draft' AND touched_at < %s", [now]),
    lambda row, now: older(row, now) if now else row.touched_at < YEAR,
    older,
]


@pytest.mark.parametrize("stale", ACCEPTED)
def test_predicate_that_keeps_its_columns_and_the_time_is_accepted(stale: Callable[..., Any]) -> None:
    assert only(declared(stale, age=timedelta(days=14))).stale is stale


@pytest.mark.parametrize("stale", TIMELESS)
def test_predicate_without_the_time_is_rejected_unless_it_takes_none(stale: Callable[..., Any]) -> None:
    assert refusal(stale) == (
        "shop.drafts: stale does not depend on the time it is given, so rows of any age are stale; write a comparison "
        "with it: lambda row, now: row.expires_at <= now; or lambda row: ..., if the age does not matter"
    )
    assert stage_of(declared(lambda row: stale(row, None))).name == "rows"


def test_age_of_a_predicate_without_the_time_is_rejected() -> None:
    assert "so the age makes no difference" in refusal(lambda row: row.state == "draft", age=timedelta(days=1))


@pytest.mark.parametrize("stale", EVALUATED_BY_PYTHON)
def test_condition_that_python_evaluates_is_rejected(stale: Callable[..., Any]) -> None:
    assert "write (A) & (B), (A) | (B), ~(A), row.column.in_([...])" in refusal(stale)


@pytest.mark.parametrize("value", [True, False, None, 14, "expired", ()])
def test_predicate_that_returns_no_condition_is_rejected(value: object) -> None:
    assert refusal(lambda row, now: value).startswith(
        f"shop.drafts: stale returns {value!r}; write a condition on columns: lambda row, now: row.expires_at <= now"
    )


def test_predicate_that_drops_a_column_is_rejected_with_its_sql() -> None:
    refused = refusal(forgets_a_column)

    assert refused.startswith('shop.drafts: stale uses row.state, but its SQL does not: ("t1"."touched_at" < %s); ')
    assert refused.endswith("write (A) & (B) to join conditions")


@pytest.mark.parametrize("stale", [lambda: None, lambda row, now, more: older(row, now)])
def test_predicate_with_other_parameters_is_rejected(stale: Callable[..., Any]) -> None:
    with pytest.raises(DeclarationError, match="stale is called with a row and the time; write lambda row, now: "):
        declared(stale)


def test_allowed_states_do_not_hide_a_predicate_without_the_time() -> None:
    assert "does not depend on the time" in refusal(lambda row, now: row.id > 0, action=Transition(machine, "drop"))


def test_setting_read_by_a_predicate_is_no_condition() -> None:
    drafts_only, weights = True, [1, 2]

    def stale(row: Any, now: datetime) -> Any:
        condition = older(row, now)
        if drafts_only and weights:
            condition &= row.weight.in_(weights)
        return condition if condition is not None else older(row, now)

    assert only(declared(stale)).stale is stale


@pytest.mark.parametrize("sweep", [sweep for family in BUILT_IN for sweep in family.SWEEPS], ids=lambda each: each.name)
def test_built_in_sweeps_depend_on_the_time(sweep: Sweep) -> None:
    assert all(takes_time(part.stale) for part in sweep.parts if isinstance(part, Rows))
    assert changed(sweep, batch=7).limits.batch == 7


def test_missing_column_is_rejected_with_those_of_the_table() -> None:
    assert refusal(lambda row, now: row.toched_at < now) == (
        "shop.drafts: stale reads row.toched_at, but Draft has no column 'toched_at'; its columns are "
        "id, shop, state, archived, weight, day, "
        "touched_at"
    )


def test_failing_predicate_is_declared_and_fails_where_it_is_used() -> None:
    sweep = declared(lambda row, now: {"days": 3}["limit"])

    with pytest.raises(DeclarationError, match="shop.drafts: stale fails: KeyError: 'limit'"):
        sweep.stages_for_run()


def test_predicate_that_failed_at_its_declaration_is_checked_at_its_use() -> None:
    ready = False

    def stale(row: Any, now: datetime) -> Any:
        if not ready:
            raise LookupError("no limit yet")
        return row.id > 0

    sweep = declared(stale)
    ready = True

    with pytest.raises(DeclarationError, match="does not depend on the time"):
        sweep.stages_for_run()


def test_predicate_that_reads_the_clock_itself_is_rejected() -> None:
    message = refusal(lambda row, now: row.touched_at < datetime.now(UTC), age=timedelta(days=14))

    assert "stale reads the clock itself" in message and "lambda row, now: row.expires_at <= now" in message


@pytest.mark.parametrize(
    "stale",
    [
        lambda row, now: (row.touched_at < now) | True,
        lambda row, now: (row.touched_at < now) & None,
        lambda row, now: row.touched_at < now | row.archived,
        lambda row, now: ~((row.touched_at < now) | True),
    ],
    ids=["or_true", "and_none", "no_parentheses", "nested"],
)
def test_predicate_that_joins_a_plain_value_is_rejected(stale: Callable[..., Any]) -> None:
    assert "put each comparison in parentheses" in refusal(stale)


LACKING_PARENTHESES: Final[list[tuple[Callable[..., Any], str]]] = [
    (lambda row, now: (row.touched_at < now) & row.archived == False, "compares a condition with False"),  # noqa: E712
    (lambda row, now: (row.touched_at < now) | row.archived == False, "compares a condition with False"),  # noqa: E712
    (lambda row, now: row.archived == False & (row.touched_at < now), "joins a condition with False"),
    (lambda row, now: row.touched_at < now & row.weight == 3, "joins a condition with an object of type datetime"),
    (lambda row, now: (row.touched_at < now) & row.weight != 3, "applies & to row.weight"),
    (lambda row, now: (row.touched_at < now) & row.weight >= 3, "applies & to row.weight"),
    (lambda row, now: row.state == "draft" & row.touched_at < now, "joins a condition with 'draft'"),
    (lambda row, now: ~(row.touched_at >= now) & row.state == None, "applies & to row.state"),  # noqa: E711
    (lambda row, now: older(row, now) & (row.weight & row.id).in_([3]), "applies & to row.weight"),
    (lambda row, now: ~older(row, now) == False, "compares a condition with False"),  # noqa: E712
    (lambda row, now: row.archived == (row.touched_at < now), "compares a condition with row.archived"),
    (lambda row, now: ~row.weight, "applies ~ to row.weight"),
]


@pytest.mark.parametrize(("stale", "said"), LACKING_PARENTHESES)
def test_comparison_of_a_condition_is_rejected_with_the_right_form(stale: Callable[..., Any], said: str) -> None:
    message = refusal(stale)

    assert message.startswith(f"shop.drafts: stale {said}")
    assert "put each comparison in parentheses: (A) & (B), (A) | (B), ~(A)" in message


@pytest.mark.parametrize(
    ("stale", "said"),
    [
        (lambda row, now: row.state == None, "compares row.state with None; write row.state.is_null()"),  # noqa: E711
        (lambda row, now: row.state != None, "with None; write row.state.is_null(False)"),  # noqa: E711
        (lambda row, now: row.touched_at < datetime(2026, 1, 1), "has no time zone; write datetime(..., tzinfo=UTC)"),  # noqa: DTZ001
        (lambda row, now: row.touched_at < 14, "compares row.touched_at with 14; write a datetime with a time zone"),
        (lambda row, now: row.touched_at < timedelta(days=1), "datetime.timedelta(days=1); write a datetime"),
        (lambda row, now: row.touched_at.between(now, "later"), "compares row.touched_at with 'later'; write a datet"),
        (lambda row, now: row.weight == "3", "compares row.weight with '3'; write a number"),
        (lambda row, now: row.weight.in_([1, True]), "compares row.weight with True; write a number"),
        (lambda row, now: row.shop == "x", "compares row.shop with 'x'; write a number"),
        (lambda row, now: row.state == 3, "compares row.state with 3; write a text"),
        (lambda row, now: row.archived == "no", "compares row.archived with 'no'; write True or False"),
    ],
)
def test_value_that_cannot_be_compared_is_rejected_with_what_to_write(stale: Callable[..., Any], said: str) -> None:
    assert said in refusal(stale)


def test_condition_as_a_value_of_a_function_may_be_compared() -> None:
    declared(lambda row, now: fn.COALESCE(older(row, now), False) == True)  # noqa: E712


def test_python_identity_with_none_is_rejected_with_is_null() -> None:
    hint = "; instead of column is None write column.is_null()"

    assert refusal(lambda row, now: older(row, now) & (row.state is None)).endswith(hint)
    assert refusal(lambda row, now: row.state is not None).endswith(hint)


class Query:
    """Stands for a QuerySet, which sends its query when it is written out."""

    def __repr__(self) -> str:
        raise AssertionError("the query was sent")


def test_query_as_a_predicate_is_rejected_without_sending_it() -> None:
    assert "stale returns an object of type Query; write a condition on columns" in refusal(lambda row, now: Query())
    assert "joins a condition with an object of type Query" in refusal(lambda row, now: older(row, now) & Query())


def test_column_of_another_model_is_rejected_with_both_models() -> None:
    message = refusal(lambda row, now: older(row, now) & (Shop.closed_at < now))

    assert message == (
        "shop.drafts: stale uses closed_at of Shop, but the stage processes the table of Draft; put columns of "
        "other tables into a subquery: column.in_(Shop.select(...).where(...))"
    )


def test_column_of_the_model_is_rejected_with_that_of_the_row() -> None:
    assert refusal(lambda row, now: older(row, now) & (Draft.shop == 3)) == (
        "shop.drafts: stale uses Draft.shop; write row.shop"
    )


def test_hold_on_a_column_of_the_model_is_rejected_with_that_of_the_row() -> None:
    message = refusal(older, hold=lambda row: (Shop.id == row.shop) | (Draft.state == "kept"))

    assert message == "shop.drafts: hold uses Draft.state; write row.state"


def test_column_of_another_model_in_a_subquery_is_accepted() -> None:
    closed = Shop.select(Shop.id).where(Shop.closed_at < datetime(2026, 1, 1, tzinfo=UTC))
    alias = Shop.alias()

    def linked(row: Any) -> Any:
        return fn.EXISTS(alias.select().where(alias.id == row.shop))

    declared(lambda row, now: older(row, now) & row.shop.in_(closed) & linked(row))


def test_alias_of_the_model_outside_of_a_subquery_is_rejected() -> None:
    other = Draft.alias()

    assert "stale uses touched_at of an alias of Draft" in refusal(
        lambda row, now: older(row, now) & (other.touched_at < now)
    )


@pytest.mark.parametrize("length", [timedelta(), timedelta(days=-14)])
def test_age_that_is_not_positive_is_rejected(length: timedelta) -> None:
    with pytest.raises(DeclarationError, match="Rows: age is .*; write a time above 0 seconds"):
        declared(older, age=length)
