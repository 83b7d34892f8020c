"""Keyset comparison: SQL conditions for the rows after, until or at a position in the order of a table stage.

Comparisons differ for columns that may be NULL; `may_be_null` tells which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

from peewee import OP, DateTimeField, Expression, Field, Tuple, Value

from housekeeping.database.catalog import table_if_visible
from housekeeping.database.compiled_query import Parameter
from housekeeping.sweeps.stages.stage import Position

#: Tells whether a column can be NULL in the stale rows.
MayBeNull = Callable[[Field], bool]

#: A comparison with NULL is not true, so a row that one of these matches has a value.
_COMPARISONS: Final = frozenset((OP.EQ, OP.NE, OP.LT, OP.LTE, OP.GT, OP.GTE, OP.IN, OP.BETWEEN, OP.LIKE, OP.ILIKE))


def comes_after(order: Sequence[Any], position: Position, may_be_null: MayBeNull) -> Expression:
    """Return the condition that a row comes after the position.

    It holds only for rows whose first order column is NULL as in the position, or is not NULL as in the position.
    """
    first, *others = order
    after: Expression
    if len(position) < len(order):  # before the NULLs; without ==, which placeholders overload
        after = first.is_null()
        return after
    values = literals(position)
    if not any(may_be_null(column) for column in others):
        after = Tuple(*order) > Tuple(*values)
        if position[0] is None:
            after = first.is_null() & (Tuple(*others) > Tuple(*values[1:]))
        return after
    # A row comparison is not defined for NULL, so the columns are compared one by one. The first column is compared
    # once more for the index.
    later: Any = None
    for column, value in reversed(list(zip(order, values, strict=True))):
        same = column.is_null() if value is None else column == value
        later = same & later if later is not None else None
        if value is not None:
            greater = column > value
            if column is not first and may_be_null(column):
                greater |= column.is_null()
            later = greater if later is None else greater | later
    after = later if position[0] is None else (first >= values[0]) & later
    return after


def comes_before(order: Sequence[Any], position: Position) -> Expression:
    """Return the condition that a row comes before the position, in an order without NULL."""
    before: Expression = Tuple(*order) < Tuple(*literals(position))
    return before


def comes_until(order: Sequence[Any], position: Position, may_be_null: MayBeNull) -> Expression:
    """Return the condition that a row does not come after the position."""
    after: Any = comes_after(order, position, may_be_null)
    value = literals(position)[0]
    until: Expression = ~after if value is None else (order[0] <= value) & ~after
    return until


def has_key(key: Sequence[Field], values: Sequence[Position]) -> Expression:
    """Return the condition that a row has one of these keys."""
    keys = [literals(each) for each in values]
    found: Expression = (
        key[0].in_([value for (value,) in keys]) if len(key) == 1 else Tuple(*key).in_([Tuple(*each) for each in keys])
    )
    return found


def literals(position: Position) -> list[Any]:
    """Return the values as PostgreSQL reads them; the model's columns do not convert them."""
    return [v if v is None or isinstance(v, Parameter) else Value(v, converter=False, unpack=False) for v in position]


def readable(column: Any, value: Any) -> Any:
    """Return a value of a position for people: times in ISO 8601, anything else as PostgreSQL writes it."""
    if not isinstance(column, DateTimeField) or not isinstance(value, str):
        return value
    try:
        return column.python_value(datetime.fromisoformat(value)).isoformat()
    except ValueError:
        return value  # infinity, or a year that Python does not have


def may_be_null(column: Field, predicate: Any) -> bool:
    """Return whether a row that matches `predicate` may have NULL in `column`; True if unknown."""
    return _is_nullable(column) and not _excludes_null(predicate, column)


def _is_nullable(column: Field) -> bool:
    """Return whether the table allows NULL in the column; without a table, whether the model does."""
    table = table_if_visible(column.model)
    return column.column_name not in table.not_null if table.exists else bool(column.null)


def _excludes_null(predicate: Any, column: Field) -> bool:
    if not isinstance(predicate, Expression):
        return False
    if predicate.op == OP.AND:
        return _excludes_null(predicate.lhs, column) or _excludes_null(predicate.rhs, column)
    if predicate.op == OP.OR:
        return _excludes_null(predicate.lhs, column) and _excludes_null(predicate.rhs, column)
    if predicate.op == OP.IS_NOT and predicate.rhs is None:
        return predicate.lhs is column
    return predicate.op in _COMPARISONS and (predicate.lhs is column or predicate.rhs is column)
