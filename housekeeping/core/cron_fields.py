"""Syntax of schedules: reads the five fields of a cron expression, or says in one line what is wrong with it.

A schedule has five fields (minute, hour, day of the month, month, day of the week) of ``*``, numbers, names (``jan``,
``mon``), ranges, steps (``*/15``, ``10-50/10``) and lists of these. Or it is one of ``@hourly``, ``@daily``,
``@midnight``, ``@weekly``, ``@monthly``, ``@yearly``, ``@annually``. Sunday is ``0``, ``7`` or ``sun``. ``L`` and
``LW`` are the month's last day and last weekday, ``friL`` or ``5L`` its last Friday, ``mon#2`` its second Monday.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from housekeeping.core.errors import DeclarationError

_ALIASES: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

_TERM: Final = re.compile(r"(?:\*|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>\d+))?", re.ASCII)
_DAY_OF_MONTH: Final = re.compile(r"lw?")
_DAY_OF_WEEK: Final = re.compile(r"(?P<day>\w+?)(?P<which>l|#[1-5])", re.ASCII)


class _Field(NamedTuple):
    name: str
    low: int
    high: int
    example: str
    names: str = ""
    special: re.Pattern[str] | None = None


_FIELDS: Final = (
    _Field("minute", 0, 59, "*/6 * * * *"),
    _Field("hour", 0, 23, "0 3 * * *"),
    _Field("day of the month", 1, 31, "0 0 1,15 * *", "", _DAY_OF_MONTH),
    _Field("month", 1, 12, "0 0 1 jan,jul *", "jan feb mar apr may jun jul aug sep oct nov dec"),
    _Field("day of the week", 0, 7, "0 0 * * mon-fri", "sun mon tue wed thu fri sat", _DAY_OF_WEEK),
)


def read_fields(spec: str) -> list[str]:
    """Check every entry and return the five fields, with numbers in place of names.

    Raises:
      DeclarationError: If an entry is not valid.
    """
    words = str(spec).lower().split()
    if len(words) == 1 and words[0].startswith("@"):
        if words[0] not in _ALIASES:
            raise invalid_schedule(spec, f"{words[0]} is not one of {', '.join(_ALIASES)}", "@daily")
        words = _ALIASES[words[0]].split()
    if len(words) != len(_FIELDS):
        names = ", ".join(field.name for field in _FIELDS)
        raise invalid_schedule(spec, f"the number of fields is {len(words)}, not 5 ({names})", _FIELDS[0].example)
    fields = []
    for field, word in zip(_FIELDS, words, strict=True):
        try:
            fields.append(",".join(_entry(field, entry) for entry in word.split(",")))
        except ValueError as error:
            raise invalid_schedule(spec, str(error), field.example) from None
    return fields


def _entry(field: _Field, text: str) -> str:
    if field.special and (special := field.special.fullmatch(text)):
        return f"{_number(field, special['day'])}{special['which']}" if special.groups() else text
    term = _TERM.fullmatch(text)
    if term is None:
        raise ValueError(f'{field.name} "{text}" is not valid')
    values = field.high - field.low + 1
    step = "" if term["step"] is None else f"/{_within(f'{field.name} step', term['step'], 1, values)}"
    if term["first"] is None:
        return f"*{step}"
    first = _number(field, term["first"])
    if term["last"] is None:
        if step:
            # "5/15" is minute 5 in some crons, minutes 5, 20, 35 and 50 in others, and an error in the rest.
            raise ValueError(f"{field.name} {text} has a step but no range, as {first}-{field.high}{step} has")
        return str(first)
    last = _number(field, term["last"])
    if last == 0 < first and field.high == 7:
        last = 7  # the Sunday after the week, as in fri-sun
    if last < first:
        raise ValueError(f"{field.name} {text} runs backwards; {first}-{field.high},{field.low}-{last} does not")
    return f"{first}-{last}{step}"


def _number(field: _Field, text: str) -> int:
    if text in (names := field.names.split()):
        return field.low + names.index(text)
    return _within(field.name, text, field.low, field.high)


def _within(name: str, text: str, low: int, high: int) -> int:
    if not text.isdigit():
        raise ValueError(f'{name} "{text}" is not valid')
    if not low <= int(text) <= high:
        raise ValueError(f"{name} {text} is not within {low}-{high}")
    return int(text)


def invalid_schedule(spec: str, problem: str, example: str) -> DeclarationError:
    """Return the error that shows the schedule, its problem, and a valid example."""
    shown = " ".join(str(spec).split())
    return DeclarationError(f'schedule "{shown}": {problem}; write for example "{example}"')
