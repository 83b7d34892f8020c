"""Markdown tables of which some columns come from the code and the others are written by hand, in the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_BAR: Final = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True, slots=True)
class ByHand:
    """A cell that is written in the page and stays as it is.

    Attributes:
      at_first: What it says when the row is new; nothing, so that a test asks for it, unless said.
    """

    at_first: str = ""


def table(head: Sequence[str], rows: Iterable[Sequence[str | ByHand]], old: str) -> str:
    """The table with these rows, by their first cell; cells `ByHand` are those of the same row in the old one."""
    before = {row[0]: row for row in cells(old)}
    lines = [_line(head), "|" + "---|" * len(head)]
    for row in rows:
        kept = before.get(str(row[0]), [])
        lines.append(_line([_cell(cell, kept, place) for place, cell in enumerate(row)]))
    return "\n".join(lines)


def cells(text: str) -> list[list[str]]:
    """The cells of each row, the head left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in _BAR.split(line)[1:-1]] for line in lines[2:]]


def code(text: str) -> str:
    """As code within a cell."""
    return "`" + text.replace("|", "\\|") + "`"


def _cell(cell: str | ByHand, kept: Sequence[str], place: int) -> str:
    if isinstance(cell, str):
        return cell
    return kept[place] if place < len(kept) else cell.at_first


def _line(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"
