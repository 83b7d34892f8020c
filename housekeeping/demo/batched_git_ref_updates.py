"""Sample bare repositories with refs to delete: loose, packed, locked, missing and invalid ones."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database
from housekeeping.workers.batched_git_ref_updates.backends import hashed_path
from housekeeping.workers.batched_git_ref_updates.models import Deletion

TITLE: Final = "GIT REFS"
PROJECTS: Final = 40
LOOSE: Final = 30  # branches per project to delete, each in a file
PACKED: Final = 45  # packed refs per project to delete
KEPT: Final = ("refs/heads/main", "refs/heads/develop", "refs/tags/v1.0")
GONE: Final = 5  # refs per project that were already deleted by hand
_LOCKED: Final = "refs/heads/fix-000"  # in the first project, with the lock file of another git process
_NO_REFS: Final = ("HEAD", "refs/heads/a..b", "--all")

_COUNT: Final = """
SELECT count(*) FILTER (WHERE status = 1), count(*) FILTER (WHERE status = 2), count(DISTINCT project_id)
FROM batched_git_ref_updates_deletions
"""
_INSERT: Final = """
INSERT INTO {table} (project_id, ref)
SELECT project_id, ref FROM generate_series(1, %(projects)s) AS project_id, unnest(%(refs)s::text[]) AS ref
"""


def seed(folder: Path) -> str:
    """Create the repositories and fill the table in under a second; return a summary line."""
    loose = [f"refs/heads/fix-{number:03}" for number in range(LOOSE)]
    packed = [f"refs/merge-requests/{number}/head" for number in range(PACKED)]
    gone = [f"refs/heads/gone-{number}" for number in range(GONE)]
    for project in range(1, PROJECTS + 1):
        _make_repository(_root(folder) / hashed_path(project), [*KEPT, *loose], packed)
    (_root(folder) / hashed_path(1) / f"{_LOCKED}.lock").touch()
    with database.atomic():
        refs = [*loose, *packed, *gone]
        fill(PROJECTS, refs)
        fill(2, _NO_REFS)
    database.execute_sql("ANALYZE batched_git_ref_updates_deletions")
    global _seeded
    _seeded = _root(folder)
    rows = PROJECTS * len(refs) + 2 * len(_NO_REFS)
    return (
        f"{PROJECTS} bare git repositories with {len(KEPT) + LOOSE + PACKED} refs each, and {rows:,} refs to delete: "
        f"{PROJECTS * GONE} already gone, {2 * len(_NO_REFS)} invalid, one locked by another git process"
    )


def fill(projects: int, refs: Sequence[str]) -> None:
    """Add the refs of each project to the table."""
    database.execute_sql(_INSERT.format(table=quoted_name(Deletion)), {"projects": projects, "refs": list(refs)})


def settings(folder: Path) -> dict[str, str]:
    """Return the folder of the repositories."""
    return {"REPOSITORIES_ROOT": str(_root(folder))}


def counted() -> dict[str, int]:
    """Return the number of rows of each kind, and of refs in all repositories."""
    pending, processed, projects = database.execute_sql(_COUNT).fetchone()
    there = sum(_refs_in(_seeded / hashed_path(project)) for project in range(1, projects + 1)) if _seeded else 0
    return {"pending": pending, "processed": processed, "refs in the repositories": there}


#: The folder that `seed` used.
_seeded: Path | None = None


def _root(folder: Path) -> Path:
    return folder / "repositories"


def _make_repository(path: Path, loose: list[str], packed: list[str]) -> None:
    """Create a bare repository with one commit for all refs, without git, which would be slow for 40 of them."""
    (path / "refs/heads").mkdir(parents=True)
    (path / "HEAD").write_text("ref: refs/heads/main\n")
    (path / "config").write_text("[core]\n\trepositoryformatversion = 0\n\tbare = true\n")
    tree = _add_object(path, "tree", b"")
    who = b"A Developer <developer@example.com> 1767225600 +0000"
    commit = _add_object(path, "commit", b"tree %s\nauthor %s\ncommitter %s\n\nBegin\n" % (tree.encode(), who, who))
    for ref in loose:
        file = path / ref
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{commit}\n")
    lines = "".join(f"{commit} {ref}\n" for ref in sorted(packed))
    (path / "packed-refs").write_text(f"# pack-refs with: peeled fully-peeled sorted \n{lines}")


def _add_object(path: Path, kind: str, content: bytes) -> str:
    whole = b"%s %d\0%s" % (kind.encode(), len(content), content)
    name = hashlib.sha1(whole, usedforsecurity=False).hexdigest()
    file = path / "objects" / name[:2] / name[2:]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(zlib.compress(whole))
    return name


def _refs_in(path: Path) -> int:
    # Counted while git runs: a folder that git has just removed is skipped.
    loose = sum(not file.endswith(".lock") for _, _, files in os.walk(path / "refs") for file in files)
    packed = (path / "packed-refs").read_text().splitlines()
    return loose + sum(not line.startswith("#") for line in packed)
