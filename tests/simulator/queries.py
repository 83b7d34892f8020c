"""Interpreter of the library's peewee queries on `Postgres`.

What a query says that is not known here is refused: nothing is passed over in silence.
"""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from peewee import (
    SQL,
    Alias,
    Case,
    Cast,
    DataError,
    Expression,
    Field,
    Function,
    Insert,
    Negated,
    NodeList,
    Ordering,
    Select,
    Update,
    Value,
)
from psycopg2.extras import Json

from tests.internals.database import Parameter
from tests.simulator.postgres import Mode, Postgres, Row, Transaction

_COMPARISONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "+": operator.add,
    "-": operator.sub,
}
_MODES: Final[dict[str, Mode]] = {"FOR SHARE": "share", "FOR UPDATE": "update"}


@dataclass
class Cursor:
    """Cursor as psycopg2 returns it."""

    rows: list[tuple[Any, ...]]
    columns: list[str] = field(default_factory=list)
    rowcount: int = 0

    @property
    def description(self) -> list[tuple[str]]:
        return [(name,) for name in self.columns]

    def fetchone(self) -> tuple[Any, ...] | None:
        return self.rows.pop(0) if self.rows else None

    def close(self) -> None:
        self.rows = []


class Unknown(BaseException):
    """Unsupported query. It is not an `Exception`, which a run would treat as a failure."""


def execute(postgres: Postgres, transaction: Transaction, query: Any, values: tuple[Any, ...] = ()) -> Cursor:
    """Run a query in a transaction with these parameters."""
    return _Statement(postgres, transaction, values).execute(query)


class _Statement:
    def __init__(self, postgres: Postgres, transaction: Transaction, values: tuple[Any, ...]) -> None:
        self._postgres = postgres
        self._transaction = transaction
        self._values = values
        self._model: Any = None
        self._around: dict[Any, Row] = {}  # model -> outer row of a subquery

    def execute(self, query: Any) -> Cursor:
        self._model = getattr(query, "model", None)
        if query._cte_list:
            raise Unknown("WITH")
        kinds: list[tuple[type, Callable[[Any], Cursor]]] = [
            (Select, self._select),
            (Insert, self._insert),
            (Update, self._update),
        ]
        for kind, do in kinds:
            if isinstance(query, kind):
                return do(query)
        raise Unknown(type(query).__name__)

    def _select(self, query: Any) -> Cursor:
        if query._group_by or query._having or query._windows or query._offset:
            raise Unknown("SELECT")
        columns = list(query._returning)
        if not query._from_list:
            return Cursor([tuple(self._value(each, {}) for each in columns)], ["value"] * len(columns))
        rows = [row for _, row in self._found(query)]
        if len(columns) == 1 and isinstance(columns[0], Function):
            return Cursor([(self._aggregate(columns[0], rows),)], ["value"])
        rows = [row for _, row in self._ordered(query, rows)]
        return self._answer(columns, rows)

    def _found(self, query: Any) -> Iterator[tuple[Any, Row]]:
        """Yield the rows of a SELECT, locked if requested."""
        table = _table(query)
        mode = None
        if query._for_update is not None:
            said = query._for_update._expr
            mode = _MODES["FOR UPDATE" if said is True else said]
        for key, row in list(self._postgres.rows(table, self._transaction)):
            if not self._holds(query._where, row):
                continue
            if mode is None:
                yield key, row
                continue
            self._postgres.lock(self._transaction, (table, key), mode)
            # It may have changed during the wait.
            now = self._postgres.row(table, key, self._transaction)
            if now is not None and self._holds(query._where, now):
                yield key, now

    def _ordered(self, query: Any, rows: list[Row]) -> list[tuple[int, Row]]:
        found = list(enumerate(rows))
        for each in reversed(query._order_by or ()):
            node, down = (each.node, each.direction == "DESC") if isinstance(each, Ordering) else (each, False)
            found.sort(key=lambda pair, node=node: self._value(node, pair[1]), reverse=down)
        return found[: query._limit] if query._limit is not None else found

    def _aggregate(self, function: Any, rows: list[Row]) -> Any:
        values = [self._value(argument, row) for row in rows for argument in function.arguments]
        values = [value for value in values if value is not None]
        if function.name.upper() == "COUNT":
            return len(values)
        if function.name.upper() in ("MAX", "MIN"):
            return (max if function.name.upper() == "MAX" else min)(values, default=None)
        raise Unknown(function.name)

    def _insert(self, query: Any) -> Cursor:
        if not isinstance(query._insert, dict):
            raise Unknown("INSERT of several rows")
        table, meta = _table(query), query.model._meta
        row: Row = dict.fromkeys(meta.columns)
        given = {**{name: default for name, default in meta.defaults.items()}, **query._insert}
        for name, value in given.items():
            node = meta.fields[name] if isinstance(name, str) else name
            row[node.column_name] = self._new(value() if callable(value) else value, row)
        key_name = meta.primary_key.column_name
        if row[key_name] is None:
            row[key_name] = self._postgres.number(table)
        key = row[key_name]
        self._postgres.lock(self._transaction, (table, key), "update")
        there = self._postgres.row(table, key, self._transaction)
        if there is not None:
            if query._on_conflict is None or query._on_conflict._update is None:
                raise Unknown("INSERT of a row that is there")
            changes = {node.column_name: self._new(value, there) for node, value in query._on_conflict._update.items()}
            row = {**there, **changes}
        self._postgres.insert(self._transaction, table, key, row)
        return self._answer(list(query._returning or ()), [row], 1)

    def _update(self, query: Any) -> Cursor:
        if query._from:
            raise Unknown("UPDATE FROM")
        table = _table(query)
        changed = []
        for key, row in list(self._postgres.rows(table, self._transaction)):
            if not self._holds(query._where, row):
                continue
            after = self._postgres.update(
                self._transaction,
                table,
                key,
                lambda now: self._holds(query._where, now),
                lambda now: {node.column_name: self._new(value, now) for node, value in query._update.items()},
            )
            changed += [] if after is None else [after]
        return self._answer(list(query._returning or ()), changed, len(changed))

    def _answer(self, columns: list[Any], rows: list[Row], rowcount: int | None = None) -> Cursor:
        names = [_name_of(each) for each in columns]
        values = [tuple(copy.copy(self._value(each, row)) for each in columns) for row in rows]
        return Cursor(values, names, len(rows) if rowcount is None else rowcount)

    def _holds(self, where: Any, row: Row) -> bool:
        return where is None or self._value(where, row) is True

    def _new(self, value: Any, row: Row) -> Any:
        new = self._value(value, row)
        return copy.deepcopy(new) if isinstance(new, dict | list) else new

    def _value(self, node: Any, row: Row) -> Any:
        """Return the value of an expression for a row. None is unknown, as in SQL."""
        if isinstance(node, Field):
            return self._around.get(node.model, row)[node.column_name]
        if isinstance(node, Select):
            return self._scalar(node, row)
        if isinstance(node, Expression):
            return self._expression(node, row)
        if isinstance(node, Alias):
            return self._value(node.node, row)
        if isinstance(node, Negated):
            value = self._value(node.node, row)
            return None if value is None else not value
        if isinstance(node, Cast):
            value, kind = self._value(node.node, row), vars(node)["_cast"]  # values have no types here, except JSON
            if kind == "boolean" and value != "true":
                raise DataError(f"invalid input syntax for type boolean: {value}")
            return json.loads(value) if kind == "jsonb" and isinstance(value, str) else value
        if isinstance(node, NodeList) and isinstance(node.nodes[0], SQL) and node.nodes[0].sql == "-":
            return -self._value(node.nodes[1], row)
        if isinstance(node, Case):
            chosen = (value for condition, value in node.expression_tuples if self._value(condition, row) is True)
            return self._value(next(chosen, node.default), row)
        if isinstance(node, Parameter):
            return self._values[node.number]
        if isinstance(node, Value):
            return self._value(node.value, row)
        if isinstance(node, SQL):
            if node.sql == "clock_timestamp()":
                return datetime.fromtimestamp(self._postgres.now(), UTC)
            if node.sql in ("1", "*"):
                return 1
            if node.sql == "false":
                return False
            if node.sql == "DEFAULT":
                return self._postgres.number("leases.epoch")  # the only such column that a query names
            raise Unknown(node.sql)
        if isinstance(node, Function):
            arguments: Any = node.arguments
            if str(node.name).upper() == "JSONB_BUILD_ARRAY":
                return [self._value(each, row) for each in arguments]
            if str(node.name).upper() == "JSONB_EXTRACT_PATH_TEXT":
                document, *path = (self._value(each, row) for each in arguments)
                return document.get(*path)
            if str(node.name).upper() == "HASHTEXTEXTENDED":
                return self._value(arguments[0], row)
            if str(node.name).upper() == "PG_ADVISORY_XACT_LOCK":
                self._postgres.lock(self._transaction, ("advisory", self._value(arguments[0], row)), "update")
                return None
            if str(node.name).upper() == "ARRAY":
                return self._values_of(arguments[0])
            if str(node.name).upper() == "EXISTS":
                return any(True for _ in self._found(arguments[0]))
            raise Unknown(node.name)
        if node is None or isinstance(node, str | int | float | bool | datetime | timedelta | dict | list | tuple):
            return node
        if isinstance(node, Json):
            return node.adapted
        raise Unknown(type(node).__name__)

    def _scalar(self, query: Any, row: Row) -> Any:
        """Return the value of a scalar subquery, which may refer to the outer row."""
        of_another = query.model is not self._model
        if of_another:
            self._around[self._model] = row
        try:
            found = self._values_of(query)
        finally:
            if of_another:
                del self._around[self._model]
        if len(found) > 1:
            raise Unknown("more than one row returned by a subquery used as an expression")
        return found[0] if found else None

    def _values_of(self, query: Any) -> list[Any]:
        """Return the values of the only column of a subquery."""
        rows = self._ordered(query, [row for _, row in self._found(query)])
        return [self._value(query._returning[0], row) for _, row in rows]

    def _expression(self, node: Any, row: Row) -> Any:
        left = self._value(node.lhs, row)
        if node.op == "AND":
            return self._and(left, node.rhs, row)
        if node.op == "OR":
            if left is True:
                return True
            right = self._value(node.rhs, row)
            return True if right is True else None if None in (left, right) else False
        right = self._value(node.rhs, row)
        if node.op in ("IS", "IS NOT"):
            return (left is right) == (node.op == "IS")
        if left is None or right is None:
            return None
        if node.op in ("IN", "NOT IN"):
            return (left in right) == (node.op == "IN")
        if node.op == "||":
            return {**left, **right}
        if node.op == "@>":
            return right.items() <= left.items()
        if node.op in _COMPARISONS:
            return _COMPARISONS[node.op](left, right)
        raise Unknown(node.op)

    def _and(self, left: Any, rhs: Any, row: Row) -> Any:
        if left is False:
            return False
        right = self._value(rhs, row)
        return False if right is False else None if None in (left, right) else True


def _name_of(column: Any) -> str:
    if isinstance(column, Alias):
        return str(column.name)
    return str(column.column_name) if isinstance(column, Field) else "value"


def _table(query: Any) -> str:
    name: str = query.model._meta.table_name
    return name
