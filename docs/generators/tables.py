"""Markdown tables with generated columns and columns written by hand, in the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_BAR: Final = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True, slots=True)
class ByHand:
    """Cell that is written by hand in the page and kept.

    Attributes:
      at_first: What it says when the row is new; nothing, so that a test asks for it, unless said.
    """

    at_first: str = ""


def table(head: Sequence[str], rows: Iterable[Sequence[str | ByHand]], old: str) -> str:
    """Return a table with these rows. `ByHand` cells come from the old row with the same first cell."""
    before = {row[0]: row for row in cells(old)}
    lines = [_line(head), "|" + "---|" * len(head)]
    for row in rows:
        kept = before.get(str(row[0]), [])
        lines.append(_line([_cell(cell, kept, place) for place, cell in enumerate(row)]))
    return "\n".join(lines)


def cells(text: str) -> list[list[str]]:
    """Return the cells of each row without the head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in _BAR.split(line)[1:-1]] for line in lines[2:]]


def code(text: str) -> str:
    """Format text as code in a cell."""
    return "`" + text.replace("|", "\\|") + "`"


def _cell(cell: str | ByHand, kept: Sequence[str], place: int) -> str:
    if isinstance(cell, str):
        return cell
    return kept[place] if place < len(kept) else cell.at_first


def _line(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"
