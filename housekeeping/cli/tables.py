"""How things are shown to people: tables, lengths of time, counts."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from typing import Any

from rich.console import Console
from rich.table import Table

#: For what a person reads; logs and progress go to stderr.
out = Console(file=sys.stdout, highlight=False)


def table(*columns: str, title: str | None = None) -> Table:
    """A table with left-aligned columns; a name that begins with ``>`` is aligned right."""
    made = Table(title=title, title_justify="left", header_style="bold", pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(
            name.removeprefix(">"),
            justify="right" if name.startswith(">") else "left",
            overflow="fold",
            no_wrap=name in ("WORKER", "STATE") or name.startswith(">"),
        )
    return made


def length(seconds: float | None) -> str:
    """A length of time in the unit that fits: ``12 ms``, ``3.4 s``, ``5 min``, ``2 h``, ``3 d``."""
    if seconds is None:
        return "-"
    for unit, size, digits in (("d", 86_400, 1), ("h", 3_600, 1), ("min", 60, 1), ("s", 1, 1)):
        if seconds >= size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds * 1000:.0f} ms"


def span(value: timedelta) -> str:
    """As `length`."""
    return length(value.total_seconds())


def counts(given: dict[str, Any]) -> str:
    """Counts in one line; what is nothing is left out."""
    shown = [f"{name} {value:,}" if not isinstance(value, bool) else name for name, value in given.items() if value]
    return ", ".join(shown) or "nothing to do"


def moment(value: datetime | None) -> str:
    """A moment in UTC to the second."""
    return "-" if value is None else value.strftime("%Y-%m-%d %H:%M:%S")
