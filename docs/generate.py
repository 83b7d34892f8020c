"""Generate the parts of the pages that come from the code: ``python -m docs.generate``, from the top folder.

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``. The function of that name in `PARTS`
writes it. Some columns of its table are written by hand, in the page. They are kept, and a new row begins with an
empty cell, which a test reports. A block after ``<!-- file: PATH -->`` shows that file. With
``; from: LINE; before: LINE`` it shows a part of the file. The page of state machines is generated as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from docs import state_machines
from docs.generators import (
    code_tables,
    command_pages,
    example_blocks,
    log_tables,
    number_tables,
    promise_tests,
    setting_tables,
)

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
    "numbers": number_tables.numbers,
    "promise_tests": promise_tests.promise_tests,
}


def pages() -> list[Path]:
    """Return the pages that have a generated part."""
    return [
        path
        for path in [*DOCS.parent.glob("*.md"), *sorted(DOCS.rglob("*.md"))]
        if _PART.search(text := path.read_text(encoding="utf-8")) or example_blocks.has_blocks(text)
    ]


def page(text: str) -> str:
    """Return the page with its generated parts up to date."""
    return example_blocks.page(_PART.sub(_part, text))


def parts(text: str) -> dict[str, str]:
    """Return the generated parts of a page by name."""
    return {found[1]: found[3] for found in _PART.finditer(text)}


def _part(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{PARTS[found[1]](found[3])}\n"


if __name__ == "__main__":
    for path in pages():
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
    state_machines.PAGE.write_text(state_machines.page(), encoding="utf-8")
