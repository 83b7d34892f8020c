"""Tables on the terminal. One that is too wide is printed in another form, so that no value is cut or broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from housekeeping.cli.console import out

_GAP: Final = 2  # spaces between columns
_INDENT: Final = 2  # spaces before the values below a row's name
_UNLIMITED: Final = 10_000  # characters


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


def print_table(printed: Table, *, empty: str | None = None) -> None:
    """Print a table in the first form that fits the terminal.

    These are one line for each row; the first value on a line of its own, above the others; a line for each value.
    Only a word that is longer than the terminal is wide is broken.

    Parameters:
      empty: Text in place of a table without rows.
    """
    if empty is not None and not printed.rows:
        out.print(empty)
        return
    columns = printed.columns
    if _width(columns) <= out.width or len(columns) == 2:
        out.print(printed)
    elif _INDENT + _width(columns[1:]) <= out.width:
        _print_below_names(printed)
    else:
        _print_values(printed)


def _width(columns: Sequence[Column]) -> int:
    """Return the least width that breaks no word; only the last column is wrapped."""
    *whole, last = columns
    widths = [_measured(each).maximum for each in whole] + [_measured(last).minimum]
    return sum(widths) + _GAP * len(whole)


def _measured(column: Column) -> Measurement:
    options = out.options.update(max_width=_UNLIMITED)
    cells = [Measurement.get(out, options, cell) for cell in (column.header, *column.cells)]
    return Measurement(max(each.minimum for each in cells), max(each.maximum for each in cells))


def _print_below_names(printed: Table) -> None:
    first, *others = printed.columns
    widths = [_measured(each).maximum for each in others]
    widths[-1] = min(widths[-1], out.width - _INDENT - sum(widths[:-1]) - _GAP * (len(others) - 1))
    _print_title(printed)
    out.print(first.header, style="bold")
    _print_row(others, widths, [each.header for each in others], style="bold")
    for name, *values in zip(*(each.cells for each in printed.columns), strict=True):
        out.print(name)
        _print_row(others, widths, values)


def _print_row(
    columns: Sequence[Column], widths: Sequence[int], values: Sequence[RenderableType], style: str = ""
) -> None:
    row = Table.grid(padding=(0, _GAP, 0, 0))
    for column, width in zip(columns, widths, strict=True):
        row.add_column(width=width, justify=column.justify, overflow="fold")
    row.add_row(*values, style=style)
    out.print(Padding(row, (0, 0, 0, _INDENT), expand=False))


def _print_values(printed: Table) -> None:
    _print_title(printed)
    for number, values in enumerate(zip(*(each.cells for each in printed.columns), strict=True)):
        if number:
            out.print()
        row = Table.grid(padding=(0, _GAP, 0, 0))
        row.add_column(style="bold", no_wrap=True)
        row.add_column(overflow="fold")
        for column, value in zip(printed.columns, values, strict=True):
            row.add_row(column.header, value)
        out.print(row)


def _print_title(printed: Table) -> None:
    if printed.title is not None:
        out.print(printed.title)
