"""Checks of a predicate where it is declared: it is a condition, depends on the time, and keeps all its columns."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from peewee import (
    FieldAlias,
    Model,
    Node,
    PeeweeException,
    PostgresqlDatabase,
)

from housekeeping.core.errors import DeclarationError, HousekeepingError
from housekeeping.core.sanitize import described, typed_error_line
from housekeeping.sweeps.checks.column_usage import ColumnUsage, column_usage
from housekeeping.sweeps.checks.list_values import WithoutLists
from housekeeping.sweeps.checks.parentheses import EACH_IN_PARENTHESES, JoinedConditions
from housekeeping.sweeps.partitions.stage import PartitionStage
from housekeeping.sweeps.stages.call import CallStage
from housekeeping.sweeps.stages.hold import ExceptHeld, needs_no_row, outer_columns
from housekeeping.sweeps.stages.table_stage import TableStage
from housekeeping.sweeps.table_models.naming import EXAMPLE as ROW_EXAMPLE
from housekeeping.sweeps.table_models.naming import HOLD_EXAMPLE, RowHold, RowPredicate, of_another_library

if TYPE_CHECKING:
    from housekeeping.sweeps.declaration import Sweep

#: Two times that differ in every part, also in the day of the week.
_TIMES: Final = (datetime(2024, 2, 12, 3, 14, 15, 926535, UTC), datetime(2026, 11, 25, 16, 47, 38, 1, UTC))
_SHOWN: Final = 200  # characters of the SQL
_EXAMPLE: Final = "lambda now: Session.expires_at <= now"
_HOLD_EXAMPLE: Final = "lambda: LegalHold.user_id == Session.user_id"

#: Renders SQL without a server.
_offline: Final = PostgresqlDatabase(None)


def check_predicates(sweep: Sweep) -> None:
    """Check the predicate and the hold of each stage; needs no database.

    Raises:
      DeclarationError: One may match more, or hold fewer, rows than its author means. The text says what to write.
      Exception: One itself fails, so that nothing is known of it.
    """
    for each in sweep.declared_stages():
        if isinstance(each, TableStage):
            # A stage of your own may join other tables.
            model = each.model if type(each) in (TableStage, CallStage) else None
            declared = each.stale.stale if isinstance(each.stale, ExceptHeld) else each.stale
            stale = declared if sweep.stale is None else sweep.stale
            check_predicate(sweep.name, stale, model=model, always_stale=sweep.always_stale)
            if each.hold is not None:
                check_hold(sweep.name, each.hold, each.model)
        elif isinstance(each, PartitionStage):
            if each.stale is not None:
                # The age of the partition is checked anyway.
                check_predicate(sweep.name, sweep.stale or each.stale, model=each.model, always_stale=True)
            if sweep.hold is not None:
                check_hold(sweep.name, sweep.hold, each.model)


def recheck_predicates(sweep: Sweep) -> None:
    """Check the predicates of a sweep of which one failed when it was declared.

    Raises:
      DeclarationError: As `check_predicates`, or a predicate fails again.
      peewee.PeeweeException: A predicate needs the database, which fails.
    """
    try:
        check_predicates(sweep)
    except (PeeweeException, HousekeepingError):
        raise
    except Exception as error:
        failing = "stale" if sweep.hold is None else "stale or hold"
        raise DeclarationError(f"{sweep.name}: {failing} fails: {typed_error_line(error)}") from error


def check_predicate(
    name: str, stale: Callable[[datetime], Any], *, model: type[Model] | None, always_stale: bool
) -> None:
    """Reject a predicate that may match more rows than its author means; needs no database.

    Parameters:
      model: The table whose columns it may use outside of subqueries; None for any.
      always_stale: Whether the predicate need not depend on the time, nor keep the columns it uses.

    Raises:
      DeclarationError: The text says what to write.
      Exception: The predicate itself fails, so that nothing is known of it.
    """
    _check_signature(name, stale)
    example = ROW_EXAMPLE if isinstance(stale, RowPredicate) else _EXAMPLE
    with column_usage() as usage:
        conditions = [stale(at) for at in (*_TIMES, _TIMES[0])]
    _check_conditions(f"{name}: stale", conditions, usage, example, by_row=isinstance(stale, RowPredicate))
    if model is not None:
        _check_columns(name, model, conditions[0])
    if always_stale:
        return
    first, second, first_again = (_offline.get_sql_context().sql(condition).query() for condition in conditions)
    if first != first_again:
        raise DeclarationError(
            f"{name}: stale reads the clock itself, such as datetime.now(), so stale_after does not apply; write a "
            f"comparison with the time it is given: {example}; or always_stale=True, if this is meant"
        )
    if first == second:
        raise DeclarationError(
            f"{name}: stale does not depend on the time it is given, so rows of any age are stale; write a comparison "
            f"with it: {example}; or always_stale=True, if the age does not matter"
        )
    sql = " ".join(WithoutLists().sql(condition).query()[0] for condition in conditions[:2])
    for used in usage.fields:
        if not re.search(rf"(?<!\w){re.escape(used.column_name)}(?!\w)", sql):
            raise DeclarationError(
                f"{name}: stale uses {used.model.__name__}.{used.name}, but its SQL does not: {first[0][:_SHOWN]}; "
                "write (A) & (B) to join conditions; or always_stale=True, if this is meant"
            )


def check_hold(name: str, hold: Callable[[], Any], model: type[Model] | None) -> None:
    """Reject a hold that may hold fewer rows than its author means; needs no database.

    Parameters:
      model: The table of the rows.

    Raises:
      DeclarationError: The text says what to write.
      Exception: The hold itself fails, so that nothing is known of it.
    """
    by_row = isinstance(hold, RowHold)
    example = HOLD_EXAMPLE if by_row else _HOLD_EXAMPLE
    try:
        inspect.signature(hold).bind()
    except ValueError:  # some functions written in C have no signature
        pass
    except TypeError as error:
        raise DeclarationError(f"{name}: hold is called without an argument ({error}); write {example}") from None
    with column_usage() as usage:
        condition = hold()
    _check_conditions(f"{name}: hold", [condition], usage, example, by_row=by_row)
    if needs_no_row(condition, model):
        raise DeclarationError(
            f"{name}: hold joins by | conditions on different tables within another condition, so it would hold too "
            "few rows while one table is empty; write each other table as a query: "
            "fn.EXISTS(LegalHold.select().where(...))"
        )


def _check_conditions(
    subject: str, conditions: Sequence[Any], usage: ColumnUsage, example: str, *, by_row: bool
) -> None:
    """Reject what Python has evaluated instead of PostgreSQL, and what is no condition."""
    joined = JoinedConditions(lambda column: "row" if by_row else column.model.__name__)
    if isinstance(conditions[0], Node):
        joined.sql(conditions[0])
    for problem in joined.compared:
        raise DeclarationError(f"{subject} {problem}")
    if usage.truth_tested:
        raise DeclarationError(
            f"{subject} uses and, or, not, in, if or a chained comparison on a column, which Python evaluates "
            "instead of PostgreSQL; write (A) & (B), (A) | (B), ~(A), column.in_([...]), column.between(a, b)"
        )
    for condition in conditions:
        if not isinstance(condition, Node):
            raise DeclarationError(
                f"{subject} returns {described(condition)}; write a condition on columns: {example}{_hint(condition)}"
            )
    for value in joined.values:
        raise DeclarationError(
            f"{subject} joins a condition with {described(value)}; {EACH_IN_PARENTHESES}{_hint(value)}"
        )


def _hint(value: object) -> str:
    if isinstance(value, bool):
        return "; instead of column is None write column.is_null()"
    return of_another_library(value)


def _check_columns(name: str, model: type[Model], condition: Node) -> None:
    for column in outer_columns(condition):
        if isinstance(column, FieldAlias) or column.model is not model:
            field = column.field if isinstance(column, FieldAlias) else column
            owner = field.model.__name__
            what = f"an alias of {owner}" if isinstance(column, FieldAlias) else owner
            raise DeclarationError(
                f"{name}: stale uses {field.name} of {what}, but the sweep goes through the table of {model.__name__}; "
                f"put columns of other tables into a subquery: column.in_({owner}.select(...).where(...))"
            )


def _check_signature(name: str, stale: Callable[[datetime], Any]) -> None:
    try:
        signature = inspect.signature(stale)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind(_TIMES[0])
    except TypeError as error:
        raise DeclarationError(f"{name}: stale is called with one time ({error}); write {_EXAMPLE}") from None
