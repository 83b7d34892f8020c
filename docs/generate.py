"""Writes what the reference takes from the code into its pages: ``python -m docs.generate``, from the top folder.

A part of a page that stands between ``<!-- generated: NAME -->`` and ``<!-- end -->`` is made by the function of that
name. In its tables, columns that say what something is for are written by hand, in the page, and stay; a new row
begins with an empty one, and a test asks for it. A block of code after ``<!-- file: PATH -->`` is that file, or with
``; from: LINE; before: LINE`` a part of it. The tables of broken twins and of state machines are written as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from docs import promises, state_machines
from docs.generators import code_tables, command_pages, example_blocks, log_tables, setting_tables

DOCS: Final = Path(__file__).parent
_PART: Final = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
PARTS: Final[dict[str, Callable[[str], str]]] = {
    "settings": setting_tables.environment,
    "worker_settings": setting_tables.of_one_worker,
    "commands": command_pages.commands,
    "log_lines": log_tables.lines,
    "log_fields": log_tables.fields,
    "metrics": code_tables.metric_table,
    "errors": code_tables.error_table,
    "events": code_tables.event_table,
    "actor_options": code_tables.option_table,
    "public_names": code_tables.name_table,
    "environments": code_tables.environment_table,
}


def pages() -> list[Path]:
    """The pages with a part that is made."""
    return [
        path
        for path in [*DOCS.parent.glob("*.md"), *sorted(DOCS.rglob("*.md"))]
        if _PART.search(text := path.read_text(encoding="utf-8")) or example_blocks.has_blocks(text)
    ]


def page(text: str) -> str:
    """The page with each of its parts as the code has it now."""
    return example_blocks.page(_PART.sub(_part, text))


def parts(text: str) -> dict[str, str]:
    """The parts of a page that are made, by name."""
    return {found[1]: found[3] for found in _PART.finditer(text)}


def _part(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{PARTS[found[1]](found[3])}\n"


if __name__ == "__main__":
    for path in pages():
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
    promises.PAGE.write_text(promises.page(promises.PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    state_machines.PAGE.write_text(state_machines.page(), encoding="utf-8")
