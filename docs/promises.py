"""Writes the broken twins into explanation/promises.md: ``python docs/promises.py``, from the project's top folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.twins.registry import all_twins

PAGE: Final = Path(__file__).parent / "explanation" / "promises.md"
_NUMBER: Final = re.compile(r"[A-Z]\d+")


def page(text: str) -> str:
    """The page with the fourth column, of each row that begins with a promise's number, as it should be."""
    return "\n".join(_line(line) for line in text.splitlines()) + "\n"


def _line(line: str) -> str:
    cells = line.split("|")
    number = cells[1].strip() if len(cells) == 7 else ""
    if not _NUMBER.fullmatch(number):
        return line
    twins = sorted({twin.name for twin in all_twins() if twin.promise == number})
    cells[4] = f" {', '.join(f'`{name}`' for name in twins)} "
    return "|".join(cells)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
