"""Causes: error texts without the parts specific to a record, so that equal errors can be grouped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from peewee import PeeweeException

from housekeeping.core.errors import HandlerFailed
from housekeeping.core.sanitize import error_line, in_one_line, shortened
from housekeeping.database.connection import sqlstate

_LONGEST_CAUSE: Final = 300  # characters
_LOOKED_AT: Final = 2000  # characters of an error's text
_SHORTEST_VALUE: Final = 4  # characters; a shorter value may be part of any word
#: What differs from record to record: quoted names (the last quote may be cut off), paths, words that hold a digit.
_OF_ONE_RECORD: Final = re.compile(
    r"""(?<!\w)'(?:[^'\\]|\\.)*(?:'(?!\w)|$) | "(?:[^"\\]|\\.)*(?:"|$) | `[^`]*(?:`|$) | \S*/\S* | \w*\d\w*""",
    re.VERBOSE,
)


def cause_of(error: BaseException, record: Mapping[str, Any]) -> str:
    """Return the error's type and text without the parts that are specific to the record."""
    if isinstance(error, HandlerFailed) and error.__cause__ is not None:
        return cause_of(error.__cause__, record)
    kind = type(error).__name__
    if isinstance(error, PeeweeException) and (code := sqlstate(error)):
        kind = f"{kind} {code}"
        broken = _broken_rule(error)
        if broken is not None:
            return in_one_line(f"{kind}: {broken}", _LONGEST_CAUSE)
    text = shortened(error_line(error), _LOOKED_AT)
    for value in record.values():
        if isinstance(value, str) and len(value) >= _SHORTEST_VALUE:
            text = text.replace(value, "…")
    return in_one_line(f"{kind}: {_OF_ONE_RECORD.sub('…', text)}", _LONGEST_CAUSE)


def _broken_rule(error: PeeweeException) -> str | None:
    """Return the constraint or column that PostgreSQL names for the error; None when it names neither."""
    named = getattr(getattr(error, "orig", None), "diag", None)
    if constraint := getattr(named, "constraint_name", None):
        return f"constraint {constraint}"
    if column := getattr(named, "column_name", None):
        return f"column {column}"
    return None
