"""SQL of a condition without the values of its lists, which an application may read from anywhere."""

from __future__ import annotations

from typing import Any, Final

from peewee import OP, SQL, Context, Expression, PostgresqlDatabase, Value

_LISTS: Final = (list, tuple, set, frozenset)


class WithoutLists(Context):
    """Compiler that writes ``(...)`` for a list on the right side of IN.

    For an empty list, peewee itself writes neither IN nor the column.
    """

    def __init__(self) -> None:
        super().__init__(**PostgresqlDatabase(None).get_context_options())

    def sql(self, obj: Any) -> Any:
        if isinstance(obj, Expression) and obj.op in (OP.IN, OP.NOT_IN) and _is_list(obj.rhs):
            return super().sql(Expression(obj.lhs, obj.op, SQL("(...)"), flat=obj.flat))
        return super().sql(obj)


def _is_list(values: Any) -> bool:
    return isinstance(values, _LISTS) or (isinstance(values, Value) and bool(values.multi))
