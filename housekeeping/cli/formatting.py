"""Lines and progress on the terminal. `tables` has the tables, `console` the console of both."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import click
from rich.console import Console
from rich.text import Text

from housekeeping.cli.console import NO_LIMIT
from housekeeping.cli.console import out as out
from housekeeping.core.sanitize import printable

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
