"""Check that an action's statements identify the rows of a batch by their whole key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from peewee import CTE, Alias, Column, Context, Delete, Field, PostgresqlDatabase, Update

from housekeeping.core.errors import DeclarationError
from housekeeping.sweeps.stages.actions import Write

if TYPE_CHECKING:
    from housekeeping.sweeps.stages.table_stage import TableStage


def refuse_part_of_key(stage: TableStage, write: Write) -> None:
    """Reject statements that use only some columns of the rows' key: they may change rows outside of the batch.

    Raises:
      DeclarationError: The first statement does not return the whole key, or another one compares only a part of it.
    """
    first, others = write.ctes[0], write.ctes[1:]
    key = [column.column_name for column in stage.key]
    returned = _returned(first)
    if returned is not None and not set(key) <= set(returned):
        raise DeclarationError(
            f"{stage.name}: the first statement of its action's Write returns {_listed(returned)}, but rows of "
            f"{stage.model.__name__} are identified by {_listed(key)}; write .returning(*table.key)"
            f"{_compare(first, key)}"
        )
    for other in others:
        used = _columns_used(first, other) & set(key)
        if used and used < set(key):
            raise DeclarationError(
                f"{stage.name}: a statement of its action's Write compares only {_listed(sorted(used))} of the rows of "
                f"{stage.model.__name__}, which are identified by {_listed(key)}{_compare(first, key)}"
            )


def _compare(first: CTE, key: Sequence[str]) -> str:
    if len(key) < 2:
        return ""
    name = getattr(first, "_alias", "first")
    columns = ", ".join(f"{name}.c.{column}" for column in key)
    return f"; compare all of them in the other statements: Tuple(...).in_({name}.select({columns}))"


def _listed(names: Sequence[str]) -> str:
    return f"({', '.join(names)})" if names else "nothing"


def _returned(cte: Any) -> list[str] | None:
    """Return the names of the columns that a statement returns; None if unknown, as for raw SQL."""
    if cte._columns or not hasattr(cte._query, "_returning"):
        return None
    names = []
    for each in cte._query._returning or ():
        if isinstance(each, Field):
            names.append(each.column_name)
        elif isinstance(each, Alias | Column):
            names.append(each.name)
        else:
            return None
    return names


class _ColumnsOf(Context):
    """Compiler of a statement that records the columns it reads from a CTE."""

    def __init__(self, cte: CTE) -> None:
        super().__init__(**PostgresqlDatabase(None).get_context_options())
        self.cte = cte
        self.names: set[str] = set()

    def sql(self, obj: Any) -> Any:
        if isinstance(obj, Column) and obj.source is self.cte:
            self.names.add(obj.name)
        return super().sql(obj)


def _columns_used(first: CTE, other: Any) -> set[str]:
    """Return which columns of the first statement another one reads, if that one changes or deletes rows."""
    if not isinstance(other._query, Update | Delete):
        return set()
    columns = _ColumnsOf(first)
    columns.sql(other._query)
    return columns.names
