"""Hold: a condition of rows that must stay although they are stale, such as a legal hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from peewee import (
    OP,
    SQL,
    Context,
    Expression,
    Field,
    FieldAlias,
    Function,
    Model,
    Negated,
    PostgresqlDatabase,
    Query,
    Select,
    WrappedNode,
    fn,
)

#: Returns the condition of the rows that must stay, or a query that finds a row for each of them.
Hold = Callable[[], Any]

_offline: Final = PostgresqlDatabase(None)


@dataclass(frozen=True, slots=True)
class ExceptHeld:
    """Predicate of the stale rows that are not on hold.

    Attributes:
      stale: The predicate of all stale rows.
      model: The table of the rows.
    """

    stale: Callable[[datetime], Any]
    hold: Hold
    model: type[Model] | None

    def __call__(self, now: datetime) -> Expression:
        processed: Expression = self.stale(now) & is_not_held(self.condition())
        return processed

    def condition(self) -> Any:
        """Return the condition of the rows on hold, stale or not."""
        return held_condition(self.hold, self.model)


def held_condition(hold: Hold, model: type[Model] | None) -> Any:
    """Return the condition of the rows on hold.

    A query becomes an EXISTS. So does a condition on columns of other tables, such as
    ``LegalHold.user_id == Session.user_id``.

    Parameters:
      model: The table of the rows.
    """
    return _in_sql(hold(), model)


class OnTable(WrappedNode):
    """Condition on the columns of one model, applied to the rows of another table that has these columns, too.

    Parameters:
      declared: The model whose columns the condition names.
      model: The table of the rows.
    """

    def __init__(self, condition: Any, declared: type[Model], model: type[Model]) -> None:
        super().__init__(condition)
        self._declared: Any = declared
        self._model: Any = model

    def __sql__(self, ctx: Context) -> Any:
        context: Any = ctx
        table = self._model._meta.table
        context.alias_manager[self._declared._meta.table] = table._alias or context.alias_manager[table]
        return context.sql(self.node)

    def is_not_held(self) -> OnTable:
        """Return the condition that a row of the table is not on hold."""
        return OnTable(is_not_held(self.node), self._declared, self._model)


def hold_of_another_table(hold: Hold, declared: type[Model], model: type[Model]) -> Hold:
    """Return a hold on the columns of `declared` as a hold of the rows of `model`."""
    return lambda: OnTable(held_condition(hold, declared), declared, model)


def _in_sql(condition: Any, model: type[Model] | None) -> Any:
    if isinstance(condition, Query):
        return fn.EXISTS(condition)
    if _is_join(condition, OP.OR):
        # Each side by itself: an EXISTS around both would hold nothing while the other table is empty.
        return Expression(_in_sql(condition.lhs, model), OP.OR, _in_sql(condition.rhs, model))
    others = _other_models(condition, model)
    return fn.EXISTS(Select(others, [SQL("1")]).where(condition)) if others else condition


def is_not_held(condition: Any) -> Any:
    """Return the condition that a row is not on hold. A hold that is NULL for a row does not hold it."""
    if _is_join(condition, OP.OR):
        return is_not_held(condition.lhs) & is_not_held(condition.rhs)
    if isinstance(condition, OnTable):
        return condition.is_not_held()
    if isinstance(condition, Function) and (condition.name or "").upper() == "EXISTS":
        return ~condition
    return Expression(condition, OP.IS_NOT, SQL("TRUE"))


def needs_no_row(condition: Any, model: type[Model] | None) -> bool:
    """Return whether a part of a hold needs no row of another table that the hold names outside of subqueries.

    The other table is in the hold's EXISTS, so that part would hold nothing while the table is empty.
    """
    if _is_join(condition, OP.OR):
        return needs_no_row(condition.lhs, model) or needs_no_row(condition.rhs, model)
    return bool(_other_models(condition, model)) and _has_lone_side(condition, model, (OP.OR,))


def _has_lone_side(node: Any, model: type[Model] | None, joins: tuple[str, ...]) -> bool:
    if isinstance(node, Negated):
        return _has_lone_side(node.node, model, (OP.AND, OP.OR))
    if not isinstance(node, Expression):
        return False
    sides = (node.lhs, node.rhs)
    if node.op in joins and len({frozenset(_other_models(side, model)) for side in sides}) > 1:
        return True
    return any(_has_lone_side(side, model, joins) for side in sides)


def _is_join(condition: Any, join: str) -> bool:
    return isinstance(condition, Expression) and condition.op == join


class _OuterColumns(Context):
    """Compiler that records the columns outside of subqueries."""

    def __init__(self) -> None:
        super().__init__(**_offline.get_context_options())
        self.columns: list[Field | FieldAlias] = []

    def sql(self, obj: Any) -> Any:
        if isinstance(obj, Query | OnTable):
            return self
        if isinstance(obj, Field | FieldAlias):
            self.columns.append(obj)
        return super().sql(obj)


def outer_columns(condition: Any) -> list[Field | FieldAlias]:
    """Return the columns of a condition outside of its subqueries."""
    outer = _OuterColumns()
    outer.sql(condition)
    return outer.columns


def _other_models(condition: Any, model: type[Model] | None) -> list[Any]:
    # The model of an aliased column is the alias.
    models = dict.fromkeys(column.model for column in outer_columns(condition))
    return [each for each in models if each is not model]
