"""Conditions that lack parentheses: Python applies & and | before it compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from peewee import OP, Context, Expression, Field, Negated, Node, PostgresqlDatabase, Value

EACH_IN_PARENTHESES: Final = "put each comparison in parentheses: (A) & (B), (A) | (B), ~(A)"

_JOINS: Final = {OP.AND: "&", OP.OR: "|"}
#: Operators that bind less tightly than & and |, as Python writes them.
_OPERATORS: Final = {
    OP.EQ: "==",
    OP.NE: "!=",
    OP.LT: "<",
    OP.LTE: "<=",
    OP.GT: ">",
    OP.GTE: ">=",
    OP.IS: "==",
    OP.IS_NOT: "!=",
}
_COMPARISONS: Final = {
    *_OPERATORS,
    *(OP.IN, OP.NOT_IN, OP.LIKE, OP.ILIKE, OP.BETWEEN, OP.REGEXP, OP.IREGEXP),
}


class JoinedConditions(Context):
    """Compiler that finds missing parentheses in a predicate and its subqueries.

    Attributes:
      compared: One error text for each comparison with a condition on one side, as in ``(A) & x == y``.
      values: Python values joined to a condition by & or |, such as True in ``(A) & True``.
    """

    def __init__(self, owner: Callable[[Field], str]) -> None:
        super().__init__(**PostgresqlDatabase(None).get_context_options())
        self.owner = owner
        self.compared: list[str] = []
        self.values: list[Any] = []

    def sql(self, obj: Any) -> Any:
        if isinstance(obj, Expression):
            sides = (obj.lhs, obj.rhs)
            if obj.op in _COMPARISONS and any(_is_condition(side) for side in sides):
                self.compared.append(self._wrong_comparison(obj))
                return self
            if obj.op in _JOINS and (plain := [side for side in sides if _is_plain(side)]):
                self.values += [side.value if isinstance(side, Value) else side for side in plain]
                return self
        return super().sql(obj)

    def _wrong_comparison(self, comparison: Expression) -> str:
        left, right, operator = comparison.lhs, comparison.rhs, _OPERATORS.get(comparison.op)
        other = self._written(right if _is_condition(left) else left)
        found = f"compares a condition with {'another value' if other == '...' else other}"
        if operator is None:
            return f"{found}; {EACH_IN_PARENTHESES}"
        # (A) & x == y is read as ((A) & x) == y, and x == y & (A) as x == (y & (A)).
        if _is_join(left) and isinstance(left.rhs, Field):
            join = _JOINS[left.op]
            meant = f"(A) {join} ({self._written(left.rhs)} {operator} {self._written(right)})"
        elif _is_join(right) and isinstance(left, Field) and not _is_condition(right.lhs):
            join = _JOINS[right.op]
            meant = f"({self._written(left)} {operator} {self._written(right.lhs)}) {join} (A)"
        else:
            return f"{found}; {EACH_IN_PARENTHESES}"
        return f"{found}, because Python applies {join} before {operator}; put each comparison in parentheses: {meant}"

    def _written(self, side: Any) -> str:
        if isinstance(side, Field):
            return f"{self.owner(side)}.{side.name}"
        if _is_condition(side):
            return "another"
        value = side.value if isinstance(side, Value) else side
        return repr(value) if value is None or isinstance(value, bool | int | float | str) else "..."


def _is_plain(side: Any) -> bool:
    return isinstance(side, Value) or not isinstance(side, Node)


def _is_join(side: Any) -> bool:
    return isinstance(side, Expression) and side.op in _JOINS


def _is_condition(side: Any) -> bool:
    if isinstance(side, Negated):
        return _is_condition(side.node)
    return isinstance(side, Expression) and (side.op in _JOINS or side.op in _COMPARISONS)
