"""Conditions that an operator gives as SQL: one expression, and nothing else."""

from __future__ import annotations

import re
from typing import Any, Final

from peewee import SQL, Model, PeeweeException, ProgrammingError

from housekeeping.core.errors import WrongArgument
from housekeeping.core.sanitize import error_line
from housekeeping.database.connection import database, is_connection_lost

#: Quoted texts and names, comments, brackets and the end of a statement.
_TOKENS: Final = re.compile(
    r"""(?P<quoted>'(?:[^']|'')*'|"(?:[^"]|"")*"|\$(\w*)\$.*?\$\2\$)|(?P<wrong>--|/\*|;|['"\\])|(?P<bracket>[()])""",
    re.DOTALL,
)


def condition_on(model: type[Model], text: str) -> SQL:
    """Return the condition as a part of a query on the model's table, after PostgreSQL has parsed it.

    Raises:
      WrongArgument: The text is more or less than one expression, or the table lacks a column in it.
      peewee.PeeweeException: The database does not answer.
    """
    check_expression(text)
    condition = SQL(f"({text})".replace("%", "%%"))
    query: Any = model.select(SQL("1")).where(condition)
    sql, parameters = database.get_sql_context().sql(query).query()
    try:
        with database.atomic():
            database.execute_sql(f"EXPLAIN {sql}", parameters)
    except PeeweeException as error:
        if is_connection_lost(error) or not isinstance(error, ProgrammingError):
            raise
        raise WrongArgument(f"--where is {text!r}; PostgreSQL says: {error_line(error)}") from None
    return condition


def check_expression(text: str) -> None:
    """Raise unless the text can be one expression in brackets.

    Raises:
      WrongArgument: It has a comment, a semicolon or a backslash, or its quotes or brackets do not match.
    """
    depth, is_wrong = 0, not text.strip()
    for token in _TOKENS.finditer(text):
        if token["bracket"]:
            depth += 1 if token["bracket"] == "(" else -1
        # In E'...' a backslash may precede a quote, so that the text would end elsewhere.
        has_escapes = "\\" in token[0] and text[: token.start()][-1:] in ("e", "E")
        is_wrong = is_wrong or depth < 0 or token["wrong"] is not None or has_escapes
    if is_wrong or depth:
        raise WrongArgument(f'--where is {text!r}; it should be one SQL expression, such as "user_id = 7"')
