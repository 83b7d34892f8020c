"""Checks of a predicate where it is declared: it is a condition, depends on the time, and keeps all its columns."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from peewee import (
    ColumnBase,
    Field,
    FieldAccessor,
    FieldAlias,
    ForeignKeyAccessor,
    Model,
    Node,
    ObjectIdAccessor,
    PostgresqlDatabase,
)

from housekeeping.core.errors import DeclarationError
from housekeeping.core.sanitize import described
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


@dataclass(slots=True)
class _Usage:
    """Columns that a predicate used while Python evaluated it.

    Attributes:
      fields: The columns it read from a model.
      truth_tested: Whether Python asked a condition or a column for its truth.
    """

    fields: list[Field] = field(default_factory=list)
    truth_tested: bool = False


class _ThreadState(threading.local):
    usage: _Usage | None = None


_of_thread: Final = _ThreadState()
_lock: Final = threading.Lock()
_watching = 0
_ACCESSORS: Final[dict[Any, Any]] = {
    kind: kind.__get__ for kind in (FieldAccessor, ForeignKeyAccessor, ObjectIdAccessor)
}


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


def check_predicate(
    name: str, stale: Callable[[datetime], Any], *, model: type[Model] | None, always_stale: bool
) -> None:
    """Reject a predicate that may match more rows than its author means; needs no database.

    Parameters:
      model: The table whose columns it may use outside of subqueries; None: any.
      always_stale: Whether the predicate need not depend on the time, nor keep the columns it uses.

    Raises:
      DeclarationError: The text says what to write.
      Exception: The predicate itself fails, so that nothing is known of it.
    """
    _check_signature(name, stale)
    example = ROW_EXAMPLE if isinstance(stale, RowPredicate) else _EXAMPLE
    with _watched() as usage:
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
    sql = f"{first[0]} {second[0]}"
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
    with _watched() as usage:
        condition = hold()
    _check_conditions(f"{name}: hold", [condition], usage, example, by_row=by_row)
    if needs_no_row(condition, model):
        raise DeclarationError(
            f"{name}: hold joins by | conditions on different tables within another condition, so it would hold too "
            "few rows while one table is empty; write each other table as a query: "
            "fn.EXISTS(LegalHold.select().where(...))"
        )


def _check_conditions(subject: str, conditions: Sequence[Any], usage: _Usage, example: str, *, by_row: bool) -> None:
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


@contextmanager
def _watched() -> Iterator[_Usage]:
    """Record which columns this thread uses within the block.

    peewee has no hook for this, so its classes are changed as long as any thread is in here. Other threads see no
    difference: columns are as true, and models return the same fields, as before.
    """
    usage, before = _Usage(), _of_thread.usage
    _watch(1)
    _of_thread.usage = usage
    try:
        yield usage
    finally:
        _of_thread.usage = before
        _watch(-1)


def _watch(change: int) -> None:
    global _watching
    with _lock:
        before, _watching = _watching, _watching + change
        if before == 0:
            ColumnBase.__bool__ = _truth  # type: ignore[attr-defined]
            for kind, get in _ACCESSORS.items():
                kind.__get__ = _noting(get)
        elif _watching == 0:
            del ColumnBase.__bool__  # type: ignore[attr-defined]
            for kind, get in _ACCESSORS.items():
                kind.__get__ = get


def _truth(column: ColumnBase) -> bool:
    usage = _of_thread.usage
    if usage is not None and not _is_of_peewee(2):
        usage.truth_tested = True
    return True


def _noting(get: Callable[..., Any]) -> Callable[..., Any]:
    def get_and_note(accessor: Any, instance: Any, instance_type: Any = None) -> Any:
        found = get(accessor, instance, instance_type)
        usage = _of_thread.usage
        if usage is not None and isinstance(found, Field) and not _is_of_peewee(2):
            usage.fields.append(found)
        return found

    return get_and_note


def _is_of_peewee(depth: int) -> bool:
    """Return whether the caller this many frames up is peewee's own code."""
    module = sys._getframe(depth).f_globals.get("__name__", "")
    return str(module).partition(".")[0] in ("peewee", "playhouse")
