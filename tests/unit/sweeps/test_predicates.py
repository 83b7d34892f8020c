"""Predicates that match more than their author means are rejected where they are declared, without a database."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

import pytest
from peewee import SQL, BigAutoField, BooleanField, Case, DateField, ForeignKeyField, IntegerField, TextField, Value, fn

from housekeeping.core.errors import DeclarationError
from housekeeping.sweeps import BaseModel, Delete, StateMachine, Sweep, TableStage, Transition, UtcDateTimeField
from housekeeping.workers import BUILT_IN


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


OLD: Final = Draft.touched_at < datetime(2026, 1, 1, tzinfo=UTC)
USELESS: Final = SQL("TRUE")
machine: Final = StateMachine(Draft.state, State, {"drop": ([State.OPEN], State.DROPPED)})


def declared(stale: Callable[[Any], Any], **given: Any) -> Sweep:
    return Sweep(name="shop.drafts", stale=stale, order=(Draft.touched_at, Draft.id), **{"action": Delete(), **given})


def refusal(stale: Callable[[Any], Any], **given: Any) -> str:
    with pytest.raises(DeclarationError) as refused:
        declared(stale, **given)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def older(limit: datetime) -> Any:
    return Draft.touched_at < limit


def forgets_a_column(now: datetime) -> Any:
    _ = Draft.state == "draft"
    return older(now)


def joins_in_a_helper(now: datetime) -> Any:
    return _both(Draft.state == "draft", older(now))


def _both(first: Any, second: Any) -> Any:
    return first and second


TIMELESS: Final[list[Callable[[Any], Any]]] = [
    lambda now: USELESS,
    lambda now: Draft.id > 0,
    lambda now: Draft.state == "draft",
    lambda now: SQL("touched_at < now()"),
    lambda now: Draft.touched_at < fn.NOW(),
    lambda now: OLD,
]
EVALUATED_BY_PYTHON: Final[list[Callable[[Any], Any]]] = [
    lambda now: Draft.state == "draft" and Draft.touched_at < now,
    lambda now: Draft.touched_at < now and Draft.state == "draft",
    lambda now: Draft.touched_at < now or Draft.state == "draft",
    lambda now: Draft.archived and Draft.touched_at < now,
    lambda now: (Draft.touched_at < now) & (not Draft.archived),
    lambda now: not (Draft.touched_at >= now),
    lambda now: now - timedelta(days=9) < Draft.touched_at < now,
    lambda now: (Draft.touched_at < now) & (Draft.state in ("draft", "open")),
    lambda now: OLD and Draft.touched_at < now,
    lambda now: all([Draft.state == "draft", Draft.touched_at < now]),
    joins_in_a_helper,
]
ACCEPTED: Final[list[Callable[[Any], Any]]] = [
    lambda now: (Draft.state == "draft") & (Draft.touched_at < now),
    lambda now: (Draft.state == "draft") | ~(Draft.touched_at >= now),
    lambda now: Draft.archived & (Draft.touched_at < now),
    lambda now: ~Draft.archived & Draft.touched_at.between(now - timedelta(days=9), now),
    lambda now: Draft.state.in_(["draft", "open"]) & (Draft.day < now.date()),
    lambda now: (Draft.touched_at < now) & Draft.shop.in_(Shop.select(Shop.id).where(Shop.closed_at.is_null(False))),
    lambda now: fn.EXISTS(Shop.select(SQL("1")).where((Shop.id == Draft.shop) & (Shop.closed_at < now))),
    lambda now: (Draft.shop_id == 7) & (Draft.touched_at < now),  # type: ignore[attr-defined]
    lambda now: fn.COALESCE(Draft.touched_at, now) < now,
    lambda now: Case(None, [(Draft.archived, Draft.touched_at)], Draft.day) < now,
    lambda now: Draft.state.contains("a_b") & (Draft.touched_at.cast("date") < now),
    lambda now: SQL("touched_at < %s", [now]),
    lambda now: SQL(f"{Draft.state.column_name} = 'draft' AND touched_at < %s", [now]),
    lambda now: older(now) if now else OLD,
    older,
]


@pytest.mark.parametrize("stale", ACCEPTED)
def test_predicate_that_keeps_its_columns_and_the_time_is_accepted(stale: Callable[[Any], Any]) -> None:
    assert declared(stale, stale_after=timedelta(days=14)).stale is stale


@pytest.mark.parametrize("stale", TIMELESS)
def test_predicate_without_the_time_is_rejected_unless_always_stale(stale: Callable[[Any], Any]) -> None:
    assert refusal(stale) == (
        "shop.drafts: stale does not depend on the time it is given, so rows of any age are stale; write a comparison "
        "with it: lambda now: Session.expires_at <= now; or always_stale=True, if the age does not matter"
    )
    assert declared(stale, always_stale=True).always_stale


@pytest.mark.parametrize("stale", EVALUATED_BY_PYTHON)
def test_condition_that_python_evaluates_is_rejected_always(stale: Callable[[Any], Any]) -> None:
    for always_stale in (False, True):
        assert "write (A) & (B), (A) | (B), ~(A), column.in_([...])" in refusal(stale, always_stale=always_stale)


@pytest.mark.parametrize("value", [True, False, None, 14, "expired", ()])
def test_predicate_that_returns_no_condition_is_rejected_always(value: object) -> None:
    for always_stale in (False, True):
        assert refusal(lambda now: value, always_stale=always_stale).startswith(
            f"shop.drafts: stale returns {value!r}; write a condition on columns: lambda now: Session.expires_at <= now"
        )


def test_predicate_that_drops_a_column_is_rejected_with_its_sql() -> None:
    refused = refusal(forgets_a_column)

    assert refused.startswith('shop.drafts: stale uses Draft.state, but its SQL does not: ("t1"."touched_at" < %s); ')
    assert refused.endswith("write (A) & (B) to join conditions; or always_stale=True, if this is meant")
    assert declared(forgets_a_column, always_stale=True).always_stale


@pytest.mark.parametrize("stale", [lambda: older(datetime.now(UTC)), lambda now, more: older(now)])
def test_predicate_with_other_parameters_is_rejected(stale: Callable[..., Any]) -> None:
    assert "stale is called with one time" in refusal(stale)


def test_allowed_states_do_not_hide_a_predicate_without_the_time() -> None:
    assert "does not depend on the time" in refusal(lambda now: Draft.id > 0, action=Transition(machine, "drop"))


def test_predicates_of_stages_are_checked_as_well() -> None:
    def of(stale: Callable[[Any], Any], **given: Any) -> Sweep:
        one = TableStage(name="drafts", stale=stale, order=(Draft.touched_at, Draft.id), action=Delete())
        return Sweep(name="shop.drafts", stages=lambda sweep: [one], counts=("deleted_rows",), **given)

    with pytest.raises(DeclarationError, match="does not depend on the time"):
        of(lambda now: Draft.id > 0)
    of(lambda now: Draft.id > 0, always_stale=True)
    of(older)


def test_setting_read_by_a_predicate_is_no_condition() -> None:
    drafts_only, weights = True, [1, 2]

    def stale(now: datetime) -> Any:
        condition = older(now)
        if drafts_only and weights:
            condition &= Draft.weight.in_(weights)
        return condition if condition is not None else older(now)

    assert declared(stale).stale is stale


@pytest.mark.parametrize("sweep", [sweep for family in BUILT_IN for sweep in family.SWEEPS], ids=lambda each: each.name)
def test_built_in_sweeps_depend_on_the_time(sweep: Sweep) -> None:
    assert not sweep.always_stale
    assert replace(sweep, batch_size=7).batch_size == 7


def test_columns_stay_truthy_in_other_threads_and_after_the_check() -> None:
    checking, asked = threading.Event(), threading.Event()
    seen: list[bool] = []

    def ask() -> None:
        assert checking.wait(10)
        seen.append(bool(OLD) and bool(Draft.state))
        asked.set()

    def stale(now: datetime) -> Any:
        checking.set()
        assert asked.wait(10)
        return older(now)

    other = threading.Thread(target=ask)
    other.start()
    declared(stale)
    other.join()

    assert seen == [True]
    assert bool(OLD) and "__bool__" not in vars(OLD.__class__.__mro__[1])


def test_failing_predicate_is_declared_and_fails_where_it_is_used() -> None:
    sweep = declared(lambda now: Draft.toched_at < now)  # type: ignore[attr-defined]

    with pytest.raises(DeclarationError) as refused:
        sweep.stages_for_run()

    assert str(refused.value) == (
        "shop.drafts: stale fails: AttributeError: type object 'Draft' has no attribute 'toched_at'"
    )


def test_predicate_that_failed_at_its_declaration_is_checked_at_its_use() -> None:
    ready = False

    def stale(now: datetime) -> Any:
        if not ready:
            raise LookupError("no limit yet")
        return Draft.id > 0

    sweep = declared(stale)
    ready = True

    with pytest.raises(DeclarationError, match="does not depend on the time"):
        sweep.stages_for_run()


def test_predicate_that_reads_the_clock_itself_is_rejected() -> None:
    message = refusal(lambda now: Draft.touched_at < datetime.now(UTC), stale_after=timedelta(days=14))

    assert "stale reads the clock itself" in message and "lambda now: Session.expires_at <= now" in message


@pytest.mark.parametrize(
    "stale",
    [
        lambda now: (Draft.touched_at < now) | True,
        lambda now: (Draft.touched_at < now) & None,
        lambda now: Draft.touched_at < now | Draft.archived,
        lambda now: ~((Draft.touched_at < now) | True),
        lambda now: (Draft.touched_at < now) | Value(True),
    ],
    ids=["or_true", "and_none", "no_parentheses", "nested", "wrapped"],
)
def test_predicate_that_joins_a_plain_value_is_rejected(stale: Callable[[Any], Any]) -> None:
    assert "put each comparison in parentheses" in refusal(stale)


NOT_ARCHIVED: Final = "(Draft.archived == False)"
LACKING_PARENTHESES: Final[list[tuple[Callable[[Any], Any], str]]] = [
    (lambda now: (Draft.touched_at < now) & Draft.archived == False, f"(A) & {NOT_ARCHIVED}"),  # noqa: E712
    (lambda now: (Draft.touched_at < now) | Draft.archived == False, f"(A) | {NOT_ARCHIVED}"),  # noqa: E712
    (lambda now: Draft.archived == False & (Draft.touched_at < now), f"{NOT_ARCHIVED} & (A)"),
    (lambda now: Draft.touched_at < now & Draft.weight == 3, "(A) & (Draft.weight == 3)"),
    (lambda now: (Draft.touched_at < now) & Draft.weight != 3, "(A) & (Draft.weight != 3)"),
    (lambda now: (Draft.touched_at < now) & Draft.weight >= 3, "(A) & (Draft.weight >= 3)"),
    (lambda now: Draft.state == "draft" & Draft.touched_at < now, "(A) & (Draft.touched_at < ...)"),
    (lambda now: ~(Draft.touched_at >= now) & Draft.state == None, "(A) & (Draft.state == None)"),  # noqa: E711
    (lambda now: older(now) & (Draft.weight & Draft.id).in_([3]), "(A) & (B), (A) | (B), ~(A)"),
    (lambda now: older(now) & (Draft.weight == 3).is_null(), "(A) & (B), (A) | (B), ~(A)"),
    (lambda now: ~older(now) == False, "(A) & (B), (A) | (B), ~(A)"),  # noqa: E712
    (lambda now: older(now) & Draft.touched_at.cast("date") < now, "(A) & (B), (A) | (B), ~(A)"),
    (lambda now: fn.COALESCE(older(now) & Draft.weight == 3, False), "(A) & (Draft.weight == 3)"),
    (
        lambda now: older(now) & Draft.shop.in_(Shop.select().where((Shop.closed_at < now) & Shop.id > 3)),
        "(A) & (Shop.id > 3)",
    ),
]


@pytest.mark.parametrize(("stale", "meant"), LACKING_PARENTHESES)
def test_comparison_of_a_condition_is_rejected_with_the_right_form(stale: Callable[[Any], Any], meant: str) -> None:
    for always_stale in (False, True):
        message = refusal(stale, always_stale=always_stale)

        assert message.startswith("shop.drafts: stale compares a condition with ")
        assert message.endswith(f"put each comparison in parentheses: {meant}")


def test_comparison_of_a_condition_is_rejected_on_another_librarys_table() -> None:
    with pytest.raises(DeclarationError) as refused:
        Sweep.on(
            Draft,
            name="shop.drafts",
            stale=lambda row, now: (row.touched_at < now) & row.archived == False,  # noqa: E712
            action=Delete(),
        )

    assert str(refused.value) == (
        "shop.drafts: stale compares a condition with False, because Python applies & before ==; put each comparison "
        "in parentheses: (A) & (row.archived == False)"
    )


def test_condition_as_a_value_of_a_function_may_be_compared() -> None:
    declared(lambda now: fn.COALESCE(older(now), False) == True)  # noqa: E712


def test_python_identity_with_none_is_rejected_with_is_null() -> None:
    hint = "; instead of column is None write column.is_null()"

    assert refusal(lambda now: older(now) & (Draft.state is None)).endswith(hint)
    assert refusal(lambda now: Draft.state is not None).endswith(hint)


class Query:
    """Stands for a QuerySet, which sends its query when it is written out."""

    def __repr__(self) -> str:
        raise AssertionError("the query was sent")


def test_query_as_a_predicate_is_rejected_without_sending_it() -> None:
    assert "stale returns an object of type Query; write a condition on columns" in refusal(lambda now: Query())
    assert "joins a condition with an object of type Query" in refusal(lambda now: older(now) & Query())


@pytest.mark.parametrize("always_stale", [False, True])
def test_column_of_another_model_is_rejected_with_both_models(always_stale: bool) -> None:
    message = refusal(lambda now: older(now) & (Shop.closed_at < now), always_stale=always_stale)

    assert message == (
        "shop.drafts: stale uses closed_at of Shop, but the sweep goes through the table of Draft; put columns of "
        "other tables into a subquery: column.in_(Shop.select(...).where(...))"
    )


def test_column_of_another_model_in_a_subquery_is_accepted() -> None:
    closed = Shop.select(Shop.id).where(Shop.closed_at < datetime(2026, 1, 1, tzinfo=UTC))
    alias = Shop.alias()
    linked = fn.EXISTS(alias.select().where(alias.id == Draft.shop))

    declared(lambda now: older(now) & Draft.shop.in_(closed) & linked)


def test_alias_of_the_model_outside_of_a_subquery_is_rejected() -> None:
    other = Draft.alias()

    assert "stale uses touched_at of an alias of Draft" in refusal(lambda now: older(now) & (other.touched_at < now))


@pytest.mark.parametrize("length", [timedelta(), timedelta(days=-14)])
def test_age_that_is_not_positive_is_rejected(length: timedelta) -> None:
    assert "how old a row must be" in refusal(older, stale_after=length)
