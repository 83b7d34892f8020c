"""Code blocks in the pages that show a file of docs/examples or a part of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
#: Comment with the file, and optionally the first line of the part and the line after it.
_BLOCK: Final = re.compile(
    r"(?P<mark><!-- file: (?P<path>\S+?)(?:; from: (?P<first>[^\n;]+))?(?:; before: (?P<end>[^\n;]+))? -->\n)"
    r"```python\n.*?```",
    re.DOTALL,
)


def has_blocks(text: str) -> bool:
    """Return whether the page shows a file."""
    return _BLOCK.search(text) is not None


def page(text: str) -> str:
    """Return the page with its blocks up to date."""
    return _BLOCK.sub(_block, text)


def path_of(mark: str) -> Path | None:
    """Return the file that a comment before a block names; None for any other comment."""
    found = re.match(r"<!-- file: ([^\s;]+)", mark)
    return ROOT / found[1] if found else None


def _block(found: re.Match[str]) -> str:
    lines = (ROOT / found["path"]).read_text(encoding="utf-8").splitlines()
    first = 0 if found["first"] is None else lines.index(found["first"])
    end = len(lines) if found["end"] is None else lines.index(found["end"])
    code = "\n".join(lines[first:end]).strip()
    return f"{found['mark']}```python\n{code}\n```"
