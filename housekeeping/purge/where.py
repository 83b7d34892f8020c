"""Check of the text of a WHERE: it is one expression, and ends where the statement expects it to end."""

from __future__ import annotations

import re
from typing import Final

from housekeeping.core.errors import WrongArgument

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
    """Reject a text that is more or less than one expression; PostgreSQL checks the rest.

    Raises:
      WrongArgument: The text says what is wrong.
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


def as_sql(where: str) -> str:
    """Return the expression as a part of a statement with parameters, in which ``%`` is doubled."""
    return f"({where.strip()})".replace("%", "%%")
