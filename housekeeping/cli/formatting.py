"""Tables and progress on the terminal."""

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

#: Width without a terminal: output to a file or a program is not wrapped.
_NO_LIMIT: Final = 1000
_GAP: Final = 2  # spaces between columns


class _SafeConsole(Console):
    """Console that prints control characters from databases and messages as visible escapes."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def _console(width: int | None) -> Console:
    # Values from databases and error texts contain brackets, which are not markup.
    return _SafeConsole(width=width, highlight=False, markup=False, emoji=False)


#: Output for people. Logs and progress go to stderr. `sys.stdout` is `None` if the process started with it closed.
out: Final = _console(
    None if (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ else _NO_LIMIT
)


def table(*columns: str, title: str | None = None) -> Table:
    """Return a table with left-aligned columns; ``>`` before a name aligns the column right.

    The last column wraps if the table is wider than the terminal.
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


#: Longer words may wrap before a table becomes wider than its terminal.
_LONG_WORD: Final = 20


def print_table(printed: Table) -> None:
    """Print a table. One that does not fit the terminal runs over the edge instead of losing text."""
    minimum = _minimum_width(printed)
    (out if minimum <= out.width else _console(minimum)).print(printed)


def _minimum_width(measured: Table) -> int:
    # Not rich's own minimum, which wraps every column.
    options = out.options.update(max_width=_NO_LIMIT)
    width = 0
    for column in measured.columns:
        cells = [Measurement.get(out, options, cell) for cell in (column.header, *column.cells)]
        width += max(cell.maximum if column.no_wrap else min(cell.minimum, _LONG_WORD) for cell in cells) + _GAP
    return width


#: Terminals with at least this many columns have room for names of any length.
_WIDE: Final = 120
_LONG_NAME: Final = 27  # characters that fit a narrower terminal


def fit_name(worker: str) -> str:
    """Return a worker's name, a long one in two lines if the terminal is narrow."""
    fits = out.width >= _WIDE or len(worker) <= _LONG_NAME
    return worker if fits else worker.replace(".", ".\n", 1)


class ProgressLine:
    """Progress line on a terminal. Calling it replaces the text.

    Attributes:
      is_shown: Whether there is a terminal.
    """

    def __init__(self, update: Callable[[str], object] | None) -> None:
        self._update = update
        self.is_shown = update is not None

    def __call__(self, text: str) -> None:
        if self._update is not None:
            self._update(text)


@contextmanager
def progress(text: str) -> Iterator[ProgressLine]:
    """Show a progress line on stderr within the block, if that is a terminal."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        yield ProgressLine(None)
        return
    # This spinner also works on terminals without Unicode.
    with console.status(text, spinner="line") as line:
        yield ProgressLine(line.update)
