"""Sample data of the demo: one scene per family of workers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg2
from rich.table import Table
from rich.text import Text

from housekeeping.cli.tables import table
from housekeeping.demo import (
    batched_git_ref_updates,
    bulk_imports,
    ci_stuck_builds,
    object_storage,
    user_status_cleanup,
)

#: Each has TITLE, `seed` and `counted`. It may have `settings`, and LOCK, a query of a concurrent session.
SCENES: Final[tuple[Any, ...]] = (
    user_status_cleanup,
    bulk_imports,
    object_storage,
    *([batched_git_ref_updates] if shutil.which("git") else []),  # its refs are real and deleted by git
    ci_stuck_builds,
)

Counted = dict[str, dict[str, int]]


def settings(folder: Path) -> dict[str, str]:
    """Return the settings of all scenes."""
    made = [scene.settings(folder) for scene in SCENES if hasattr(scene, "settings")]
    return {name: value for each in made for name, value in each.items()}


def counted() -> Counted:
    """Return the current numbers by scene and kind."""
    return {scene.TITLE: scene.counted() for scene in SCENES}


@contextmanager
def others_at_work(url: str) -> Iterator[None]:
    """Lock rows of the scenes in concurrent sessions."""
    with ExitStack() as stack:
        for scene in SCENES:
            if hasattr(scene, "LOCK"):
                session = stack.enter_context(closing(psycopg2.connect(url)))
                session.cursor().execute(scene.LOCK)
        yield


def compared_beside(before: Counted, after: Counted) -> tuple[Table, int]:
    """Return the changes as two tables side by side, and their height in lines."""
    lines: list[tuple[str, str, str]] = []
    for title, kinds in after.items():
        lines.append((title, "", ""))
        lines += [(f"  {kind}", f"{before[title].get(kind, 0):,}", f"{now:,}") for kind, now in kinds.items()]
    half = (len(lines) + 1) // 2
    both = Table.grid(padding=(0, 4, 0, 0))
    halves = []
    for part in (lines[:half], lines[half:]):
        rows = table("WHAT CHANGED", ">BEFORE", ">NOW")
        for line in part:
            rows.add_row(*line)
        for column in rows.columns:
            column.no_wrap, column.overflow = True, "ellipsis"
        halves.append(rows)
    both.add_row(*halves)
    return both, half + 1


def compared(before: Counted, after: Counted) -> Table:
    """Return a table with one row per kind, grouped by scene: the numbers before and now."""
    rows = table("", ">BEFORE", ">NOW", title="\nwhat changed")
    for title, kinds in after.items():
        rows.add_row(Text(title, style="bold"), "", "")
        for kind, now in kinds.items():
            rows.add_row(f"  {kind}", f"{before[title].get(kind, 0):,}", f"{now:,}")
    return rows
