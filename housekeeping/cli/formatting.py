"""How things are shown to people: tables, lengths of time, counts, the sign that something goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from housekeeping.core.sanitize import printable

#: Columns where no terminal sets them: what goes to a file or a program is not wrapped.
_NO_LIMIT: Final = 1000
_GAP: Final = 2  # between two columns


class _Printing(Console):
    """Shows what comes from databases, messages and error texts; what a terminal would obey is written out."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)


def _console(width: int | None) -> Console:
    # No markup: what is shown comes from databases and error texts, brackets and all.
    return _Printing(width=width, highlight=False, markup=False, emoji=False)


#: For what a person reads; logs and progress go to stderr. A process whose output is closed has none.
out: Final = _console(
    None if (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ else _NO_LIMIT
)


def table(*columns: str, title: str | None = None) -> Table:
    """A table with left-aligned columns; a name that begins with ``>`` is aligned right.

    Where it does not fit, the last column is folded.
    """
    made = Table(
        title=None if title is None else Text(title, style="bold"),
        title_justify="left",
        header_style="bold",
        pad_edge=False,
        box=None,
        padding=(0, _GAP, 0, 0),
    )
    for name in columns:
        made.add_column(
            name.removeprefix(">"),
            justify="right" if name.startswith(">") else "left",
            overflow="fold",
            no_wrap=name != columns[-1],
        )
    return made


#: Words longer than this may be folded, too, before a table becomes wider than its terminal.
_LONG_WORD: Final = 20


def print_table(what: Table) -> None:
    """Print a table whole: where even its narrowest form does not fit, its lines run over, and nothing is cut off."""
    least = _least_width(what)
    (out if least <= out.width else _console(least)).print(what)


def _least_width(what: Table) -> int:
    """How wide a table of `table` is when what may be folded is."""
    # Not what rich calls its minimum, which folds every column.
    options = out.options.update(max_width=_NO_LIMIT)
    width = 0
    for column in what.columns:
        cells = [Measurement.get(out, options, cell) for cell in (column.header, *column.cells)]
        width += max(cell.maximum if column.no_wrap else min(cell.minimum, _LONG_WORD) for cell in cells) + _GAP
    return width


#: A list has room for names of any length from so many columns on, and for names of this length below.
_WIDE: Final = 120
_LONG_NAME: Final = 27


def fit_name(worker: str) -> str:
    """Return a worker's name for a list, a long one in two lines where the terminal is narrow."""
    fits = out.width >= _WIDE or len(worker) <= _LONG_NAME
    return worker if fits else worker.replace(".", ".\n", 1)


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """A line on a terminal's stderr that says what goes on, gone afterwards; nothing elsewhere.

    Yields a function that replaces the text.
    """
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        yield lambda text: None
        return
    # The spinner of plain characters: a terminal without Unicode shows it, too.
    with console.status(text, spinner="line") as line:
        yield lambda text: line.update(text)
