"""Conditions of predicates: `row`, whose operators build SQL and reject expressions that Python would evaluate.

Each operation on `row` returns a `Column` or a `Condition`, which wrap a peewee node. `bare` returns that node.
`check_expression` checks a condition of ``--where``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, NoReturn
from uuid import UUID

from peewee import (
    OP,
    SQL,
    AutoField,
    BigAutoField,
    BigIntegerField,
    BooleanField,
    CharField,
    Context,
    DateField,
    DateTimeField,
    DecimalField,
    DoubleField,
    Expression,
    Field,
    FloatField,
    ForeignKeyField,
    IntegerField,
    Model,
    Negated,
    Node,
    PeeweeException,
    PostgresqlDatabase,
    ProgrammingError,
    SmallIntegerField,
    TextField,
    UUIDField,
    Value,
)

from housekeeping.core.errors import DeclarationError, WrongArgument
from housekeeping.core.logs import described, error_line
from housekeeping.database.catalog import escaped
from housekeeping.database.connection import database
from housekeeping.database.errors import is_connection_lost
from housekeeping.database.queries import NaiveUtcDateTimeField, UtcDateTimeField

#: Two times that differ in every part, also in the day of the week: a predicate that uses its time has other SQL.
TWO_TIMES: Final = (datetime(2024, 2, 12, 3, 14, 15, 926535, UTC), datetime(2026, 11, 25, 16, 47, 38, 1, UTC))
EACH_IN_PARENTHESES: Final = "put each comparison in parentheses: (A) & (B), (A) | (B), ~(A)"
_BY_PYTHON: Final = (
    "uses and, or, not, in, if or a chained comparison, which Python evaluates instead of PostgreSQL; "
    "write (A) & (B), (A) | (B), ~(A), row.column.in_([...]), row.column.between(a, b)"
)
_CONDITIONS: Final = {
    *(OP.AND, OP.OR, OP.EQ, OP.NE, OP.LT, OP.LTE, OP.GT, OP.GTE, OP.IS, OP.IS_NOT),
    *(OP.IN, OP.NOT_IN, OP.LIKE, OP.ILIKE, OP.BETWEEN, OP.REGEXP, OP.IREGEXP),
}
_NUMBER: Final = ((int, float, Decimal), "a number")
_TIMES: Final = ((datetime, date), "a datetime with a time zone, such as the `now` that the predicate gets")
#: Field -> the Python types that compare with it, and their name. A field of another class converts values itself.
_COMPARABLE: Final[Mapping[type[Field], tuple[tuple[type[Any], ...], str]]] = {
    **dict.fromkeys((DateTimeField, UtcDateTimeField, NaiveUtcDateTimeField, DateField), _TIMES),
    **dict.fromkeys((AutoField, BigAutoField, BigIntegerField, IntegerField, SmallIntegerField), _NUMBER),
    **dict.fromkeys((DecimalField, DoubleField, FloatField), _NUMBER),
    **dict.fromkeys((TextField, CharField), ((str,), "a text")),
    BooleanField: ((bool,), "True or False"),
    UUIDField: ((UUID, str), "a UUID"),
}


def bare(part: Any) -> Any:
    """Return the peewee node in a part of a condition, and anything else unchanged."""
    while isinstance(part, _Part):
        part = part.node
    return part


class _Part(Node):
    """Part of a condition; compiles like the peewee node in it."""

    __hash__ = object.__hash__

    def __init__(self, node: Any, text: str) -> None:
        self.node = node
        self.text = text

    def __sql__(self, ctx: Any) -> Any:
        return ctx.sql(self.node)

    def __bool__(self) -> NoReturn:
        raise DeclarationError(_BY_PYTHON)

    def __and__(self, other: Any) -> Condition:
        return _joined(operator.and_, self, other)

    def __rand__(self, other: Any) -> Condition:
        return _joined(operator.and_, other, self)

    def __or__(self, other: Any) -> Condition:
        return _joined(operator.or_, self, other)

    def __ror__(self, other: Any) -> Condition:
        return _joined(operator.or_, other, self)

    def __invert__(self) -> Condition:
        _check_condition(self, "~")
        return Condition(~self.node)


class Condition(_Part):
    """Condition on the columns of a row; joined by ``&``, ``|`` and ``~``."""

    def __init__(self, node: Any) -> None:
        super().__init__(node, "another")

    def _refused(self, other: object) -> NoReturn:
        written = getattr(other, "text", None) or described(other)
        raise DeclarationError(
            f"compares a condition with {written}, because Python applies & and | before it compares; "
            f"{EACH_IN_PARENTHESES}"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refused
    __hash__ = object.__hash__


class Column(_Part):
    """Column of a row, or an expression made of columns. Compared with a value, it becomes a `Condition`.

    Methods of its field, such as ``in_``, ``between``, ``is_null`` and ``contains``, work as in peewee.
    """

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Condition:  # type: ignore[override]
        return self._compared(operator.eq, "==", other)

    def __ne__(self, other: object) -> Condition:  # type: ignore[override]
        return self._compared(operator.ne, "!=", other)

    def __lt__(self, other: Any) -> Condition:
        return self._compared(operator.lt, "<", other)

    def __le__(self, other: Any) -> Condition:
        return self._compared(operator.le, "<=", other)

    def __gt__(self, other: Any) -> Condition:
        return self._compared(operator.gt, ">", other)

    def __ge__(self, other: Any) -> Condition:
        return self._compared(operator.ge, ">=", other)

    def __add__(self, other: Any) -> Column:
        return self._calculated(self.node + bare(other))

    def __radd__(self, other: Any) -> Column:
        return self._calculated(bare(other) + self.node)

    def __sub__(self, other: Any) -> Column:
        return self._calculated(self.node - bare(other))

    def __rsub__(self, other: Any) -> Column:
        return self._calculated(bare(other) - self.node)

    def __mul__(self, other: Any) -> Column:
        return self._calculated(self.node * bare(other))

    def __rmul__(self, other: Any) -> Column:
        return self._calculated(bare(other) * self.node)

    def __truediv__(self, other: Any) -> Column:
        return self._calculated(self.node / bare(other))

    def __mod__(self, other: Any) -> Column:
        return self._calculated(self.node % bare(other))

    def __getitem__(self, item: Any) -> Column:
        return self._calculated(self.node[item])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.node, name)
        if isinstance(found, Node):
            return self._calculated(found)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            if name in ("in_", "not_in") and arguments and isinstance(arguments[0], list | tuple | set | frozenset):
                self._check_all(name, arguments[0])
            elif name == "between":
                self._check_all(name, arguments)
            result = found(*map(bare, arguments), **{key: bare(value) for key, value in options.items()})
            if isinstance(result, Negated) or (isinstance(result, Expression) and result.op in _CONDITIONS):
                return Condition(result)
            return self._calculated(result) if isinstance(result, Node) else result

        return call

    def _calculated(self, node: Any) -> Column:
        return Column(node, "an expression")

    def _compared(self, compare: Callable[[Any, Any], Any], sign: str, other: Any) -> Condition:
        if isinstance(other, Condition):
            other._refused(self)
        self._check_all(sign, [other])
        return Condition(compare(self.node, bare(other)))

    def _check_all(self, sign: str, values: Iterable[Any]) -> None:
        for value in values:
            self._check(sign, value)

    def _check(self, sign: str, value: Any) -> None:
        """Reject a value that PostgreSQL cannot compare with the column, or would compare differently than Python."""
        if isinstance(value, Node | Model):
            return
        if value is None:
            form = "is_null(False)" if sign == "!=" else "is_null()"
            raise DeclarationError(f"compares {self.text} with None; write {self.text}.{form}")
        if isinstance(value, datetime) and value.tzinfo is None:
            raise DeclarationError(
                f"compares {self.text} with {value!r}, which has no time zone; write datetime(..., tzinfo=UTC)"
            )
        known = _COMPARABLE.get(type(_plain(self.node)))
        if known is None:
            return
        kinds, form = known
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            written = repr(value) if isinstance(value, timedelta) else described(value)
            raise DeclarationError(f"compares {self.text} with {written}; write {form}")


class Row:
    """The columns of a table as attributes, by their names in the model or in the database.

    Attributes:
      used: The columns that a predicate has read.
    """

    def __init__(self, model: type[Model]) -> None:
        self._model = model
        self._used: list[Field] = []

    def __getattr__(self, name: str) -> Column:
        if name.startswith("__"):
            raise AttributeError(name)
        column = column_of(self._model, name)
        if column is None:
            raise DeclarationError(f"reads row.{name}, but {without(self._model, name)}")
        self._used.append(column)
        return Column(column, f"row.{name}")


def column_of(model: type[Model], name: str) -> Field | None:
    """Return the column with this name, in the model or in the database; None if there is none."""
    meta: Any = model._meta
    # An optional field whose column is absent remains an attribute.
    found = meta.combined.get(name) or getattr(model, name, None)
    return found if isinstance(found, Field) else None


def used_columns(row: Row) -> list[Field]:
    """Return the columns that a predicate has read from its row."""
    return row._used


def without(model: type[Model], name: str) -> str:
    """Return the text of an error that a table has no such column."""
    meta: Any = model._meta
    return f"{model.__name__} has no column {name!r}; its columns are {', '.join(meta.sorted_field_names)}"


def _joined(join: Callable[[Any, Any], Any], left: Any, right: Any) -> Condition:
    for side in (left, right):
        _check_condition(side, "&" if join is operator.and_ else "|")
    return Condition(join(bare(left), bare(right)))


def _check_condition(side: Any, sign: str) -> None:
    """Reject an operand of `&` or `|` that is not a condition."""
    node = _plain(bare(side))
    if isinstance(node, Field):
        if type(node) in _COMPARABLE and not isinstance(node, BooleanField):
            raise DeclarationError(f"applies {sign} to {getattr(side, 'text', node.name)}; {EACH_IN_PARENTHESES}")
    elif not isinstance(node, Node):
        hint = "; instead of column is None write column.is_null()" if isinstance(node, bool) else ""
        raise DeclarationError(f"joins a condition with {described(node)}; {EACH_IN_PARENTHESES}{hint}")


def _plain(node: Any) -> Any:
    while isinstance(node, ForeignKeyField):
        node = node.rel_field
    return node


#: One token of SQL. Strings and quoted names hide what they contain.
_TOKEN: Final = re.compile(
    r"""(?P<string>\b[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"(?:[^"]|"")*"
    |\$(?P<tag>[A-Za-z_][A-Za-z0-9_]*|)\$.*?\$(?P=tag)\$)
    |(?P<comment>--|/\*)
    |(?P<word>[^\W\d][\w$]*)
    |(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)
_BRACKETS: Final = {")": "(", "]": "["}
#: First words of a whole clause or statement, given by mistake in place of its condition.
_CLAUSES: Final = ("where", "select", "delete", "update", "insert", "from", "with")


def check_expression(where: str) -> None:
    """Reject a text that is not exactly one SQL expression. PostgreSQL checks the expression itself.

    Raises:
      WrongArgument: It is not one expression; the error says why.
    """
    if not where.strip():
        raise WrongArgument('--where is empty; write a condition, such as "expires_at < now()", or true for all rows')
    opened: list[str] = []
    first = True
    for token in _TOKEN.finditer(where):
        kind, text = token.lastgroup, token[0]
        if kind == "tag":  # the innermost named group of a dollar-quoted string
            kind = "string"
        if text.isspace():
            continue
        if first and kind == "word" and text.lower() in _CLAUSES:
            raise WrongArgument(f'--where begins with {text}; write the condition alone, such as "expires_at < now()"')
        first = False
        if kind == "comment":
            raise WrongArgument("--where has a comment; leave it out")
        if kind != "other":
            continue
        if text in ("'", '"'):
            raise WrongArgument(f"--where has a quote ({text}) without its end")
        if text == ";":
            raise WrongArgument("--where has a semicolon; write one condition, not a statement")
        if text in _BRACKETS.values():
            opened.append(text)
        elif text in _BRACKETS and (not opened or opened.pop() != _BRACKETS[text]):
            raise WrongArgument(f"--where has a {text} without its {_BRACKETS[text]}")
    if opened:
        raise WrongArgument(f"--where has a {opened[-1]} without its end")


def as_condition(where: str) -> SQL:
    """Return the expression as a part of a query."""
    return SQL(escaped(f"({where.strip()})"))


def condition_on(model: type[Model], where: str) -> SQL:
    """Return the expression as a part of a query on the model's table, after PostgreSQL has parsed it.

    Raises:
      WrongArgument: The text is more or less than one expression, or the table lacks a column in it.
      peewee.PeeweeException: The database does not answer.
    """
    check_expression(where)
    condition = as_condition(where)
    query: Any = model.select(SQL("1")).where(condition)
    sql, parameters = database.get_sql_context().sql(query).query()
    try:
        with database.atomic():
            database.execute_sql(f"EXPLAIN {sql}", parameters)
    except PeeweeException as error:
        if is_connection_lost(error) or not isinstance(error, ProgrammingError):
            raise
        raise WrongArgument(f"--where is {where!r}; PostgreSQL says: {error_line(error)}") from None
    return condition


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
