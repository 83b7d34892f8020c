"""Which columns may be NULL in the rows that a predicate matches."""

from __future__ import annotations

from typing import Any, Final

from peewee import OP, Expression, Field

from housekeeping.database.catalog import table_if_visible

#: A comparison with NULL is not true, so a row that one of these matches has a value.
_COMPARISONS: Final = frozenset((OP.EQ, OP.NE, OP.LT, OP.LTE, OP.GT, OP.GTE, OP.IN, OP.BETWEEN, OP.LIKE, OP.ILIKE))


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
