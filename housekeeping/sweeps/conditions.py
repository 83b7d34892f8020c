"""SQL of conditions: those that operators give (``--where``), and those of predicates without the values of lists."""

from __future__ import annotations

import re
from typing import Any, Final

from peewee import OP, SQL, Context, Expression, Model, PeeweeException, PostgresqlDatabase, ProgrammingError, Value

from housekeeping.core.errors import WrongArgument
from housekeeping.core.logs import error_line
from housekeeping.database.connection import database
from housekeeping.database.errors import is_connection_lost

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
    # The driver reads a percent sign as a placeholder.
    return SQL(f"({where.strip()})".replace("%", "%%"))


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
