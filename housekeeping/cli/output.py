"""Output on the terminal: lines, tables, progress, questions and completions.

A table that is too wide is printed in another form, so that no value is cut or broken.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, TypeVar

import click
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from housekeeping.cli.main import load_settings
from housekeeping.core.errors import Refused, WrongArgument
from housekeeping.core.logs import printable
from housekeeping.engine.registry import by_problem
from housekeeping.insight.wording import as_json, parse_since
from housekeeping.ledger.schema import page_of
from housekeeping.sweeps.values import SetupProblem
from housekeeping.workers import configured_sweeps


def complete_worker(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the configured workers that begin with the text; none if the settings are wrong."""
    try:
        names = list(configured_sweeps(load_settings()))
    except Exception:  # the shell would print it into the command that is being typed
        return []
    return [name for name in names if name.startswith(incomplete)]


class NotConfirmed(Refused):
    """The operator has declined; nothing was changed."""

    exit_code = 1


def confirm(question: str, unchanged: str) -> None:
    """Ask on stderr, and return if the answer is yes.

    Parameters:
      unchanged: What an answer of no means, such as "nothing was deleted".

    Raises:
      NotConfirmed: The answer is no.
      WrongArgument: There is no terminal to ask on.
    """
    try:
        confirmed = click.confirm(question, err=True)
    except click.Abort:
        click.echo(err=True)
        if sys.stdin is None or not sys.stdin.isatty():
            raise WrongArgument(f"there is no terminal to confirm it on; {unchanged}; add --yes") from None
        confirmed = False
    if not confirmed:
        raise NotConfirmed(f"not confirmed; {unchanged}")


#: Width without a terminal: output to a file or a program is not wrapped.
NO_LIMIT: Final = 1000


class _SafeConsole(Console):
    """Console that prints control characters from databases and messages as visible escapes."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


#: `sys.stdout` is `None` if the process started with it closed.
_HAS_WIDTH: Final = (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ

#: Output for people. Logs and progress go to stderr. Colors need a terminal, and no environment variable NO_COLOR.
#: No markup: values from databases and error texts contain brackets.
out: Final = _SafeConsole(width=None if _HAS_WIDTH else NO_LIMIT, highlight=False, markup=False, emoji=False)


Command = TypeVar("Command", bound=Callable[..., Any])

_INDENT: Final = 2  # spaces before a line's continuation

#: A command to type, or a word.
_UNIT: Final = re.compile(r"[`'\"(]?housekeeping(?: [\w./:=*@<>-]+)+\S*|\S+")


def notify(line: str) -> None:
    """Print a line on stderr, beside the result on stdout."""
    click.echo(f"housekeeping: {printable(line)}", err=True)


def say(line: str | Text, style: str = "", *, indent: int | None = None) -> None:
    """Print a line, wrapped between words to the terminal's width. A command to type stays on one line.

    Text that is copied from the terminal must not contain the first half of a command followed by a line break.

    Parameters:
      indent: Spaces before the lines after the first; None for two more than before the first.
    """
    text = line if isinstance(line, Text) else Text(printable(line), style)
    if out.width >= NO_LIMIT:
        out.print(text, soft_wrap=True)
        return
    for paragraph in text.split("\n"):
        own = len(paragraph.plain) - len(paragraph.plain.lstrip()) + _INDENT
        spaces = " " * (own if indent is None else indent)
        for number, part in enumerate(paragraph.divide(_breaks(paragraph.plain, out.width, len(spaces)))):
            part.rstrip()
            out.print(Text.assemble(spaces if number else "", part), soft_wrap=True)


def _breaks(text: str, width: int, indent: int) -> list[int]:
    """Return the positions at which lines after the first begin."""
    breaks: list[int] = []
    begin, room = 0, width
    for unit in _units(text, width - indent):
        if unit.end() - begin > room and text[begin : unit.start()].strip():
            breaks.append(unit.start())
            begin, room = unit.start(), width - indent
    return breaks


def _units(text: str, width: int) -> Iterator[re.Match[str]]:
    """Yield the parts that stay on one line: commands that fit the width, and words."""
    for unit in _UNIT.finditer(text):
        if len(unit[0]) <= width:
            yield unit
        else:
            yield from re.compile(r"\S+").finditer(text, unit.start(), unit.end())


#: Terminals with at least this many columns have room for names of any length.
WIDE: Final = 120
_LONG_NAME: Final = 27  # characters that fit a narrower terminal


def fit_name(worker: str) -> str:
    """Return a worker's name, a long one in two lines if the terminal is narrow."""
    fits = out.width >= WIDE or len(worker) <= _LONG_NAME
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


_GAP: Final = 2  # spaces between columns
_UNLIMITED: Final = 10_000  # characters
_SHORT: Final = 16  # characters, such as a time of day or "in 20.9 s"


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
    """Return the least width that breaks no word; only the last column is wrapped, unless all its values are short."""
    *whole, last = columns
    of_last = _measured(last)
    widths = [_measured(each).maximum for each in whole] + [max(of_last.minimum, min(of_last.maximum, _SHORT))]
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


def print_not_set_up(problems: Mapping[str, SetupProblem]) -> None:
    """Print a line for each family that is not set up, with its workers and the reason."""
    for problem, workers in by_problem(problems).items():
        say(f"not set up: {problem.family} ({', '.join(workers)}): {problem.text}", style="dim")


_JSON: Final = "housekeeping.json"


def json_option(text: str = "Print JSON.") -> Callable[[Command], Command]:
    """Return the decorator that adds --json to a command, see `print_as_json`."""

    def note(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        context.meta[_JSON] = given

    return click.option("--json", is_flag=True, expose_value=False, callback=note, help=text)


def wants_json() -> bool:
    """Return whether the current command was given --json."""
    return bool(click.get_current_context().meta.get(_JSON))


def print_as_json(value: Any) -> bool:
    """Print a value as one line of JSON if the command was given --json; return whether it was."""
    if wants_json():
        click.echo(json.dumps(as_json(value), default=str))
    return wants_json()


T = TypeVar("T")


def options(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Return the decorator that adds several options to a command, in this order."""

    def add(command: Command) -> Command:
        for each in reversed(decorators):
            command = each(command)
        return command

    return add


def time_options(begin: str) -> Callable[[Command], Command]:
    """Return the decorator that adds --since and --until, see `read_times`.

    Parameters:
      begin: What they are the times of, such as "started".
    """
    since = f"Only those that {begin} since this time: 2h, 3d, 03:00 or 2026-11-20T03:00 (UTC)."
    return options(
        click.option("--since", metavar="TIME", help=since),
        click.option("--until", metavar="TIME", help=f"Only those that {begin} before this time."),
    )


def read_times(given: Mapping[str, str | None], now: datetime) -> tuple[datetime | None, datetime | None]:
    """Return the times of `time_options`, or raise WrongArgument."""
    since, until = (None if (text := given[name]) is None else parse_since(text, now) for name in ("since", "until"))
    return since, until


def page_options(limit: int = 50, most: int = 10_000) -> Callable[[Command], Command]:
    """Return the decorator that adds the options of a list with pages, see `print_list`."""
    return options(
        click.option(
            "--limit", type=click.IntRange(1, most), default=limit, show_default=True, help="Lines of the list."
        ),
        click.option(
            "--before", metavar="ID", help="Continue the list with older ones, after the page that named this."
        ),
        json_option(),
    )


def print_list(
    name: str,
    found: Sequence[T],
    columns: Sequence[str],
    row: Callable[[T], Iterable[str]],
    empty: str,
    **more: Any,
) -> None:
    """Print a list, or with --json an object that has it under this name.

    Parameters:
      more: Further values of the JSON object; `older` is what --before takes for the next page, None on the last one.
    """
    if print_as_json({**more, name: found}):
        return
    rows = table(*columns)
    for each in found:
        rows.add_row(*row(each))
    print_table(rows, empty=empty)
    if more.get("older") is not None:
        say(f"older ones: --before {shlex.quote(more['older'])}")


def print_page(
    name: str,
    read: Callable[..., Sequence[T]],
    columns: Sequence[str],
    row: Callable[[T], Iterable[str]],
    before: str | None,
    limit: int,
    **conditions: Any,
) -> None:
    """Read one page of rows with ids, and print it as `print_list` does.

    Parameters:
      read: Returns the rows; called with the limit, `before` and the conditions.
      before: The value of ``--before``.
      limit: Rows of a page.

    Raises:
      WrongArgument: `before` is not an id.
    """
    if before is not None and not before.isdecimal():
        raise WrongArgument(f"{before!r} is no ID; housekeeping {name} --json has them")
    found = read(limit + 1, before=None if before is None else int(before), **conditions)
    shown, older = page_of(found, limit)
    print_list(name, shown, columns, row, f"no {name}", older=None if older is None else str(older))
