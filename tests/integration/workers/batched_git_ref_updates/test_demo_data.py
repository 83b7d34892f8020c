"""The demo's repositories are real, and the worker processes its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.integration.workers.batched_git_ref_updates.repositories import Bare
from tests.internals.demo import KEPT, count_refs, refs_settings, scenes, seed_refs
from tests.internals.engine import run_sweep
from tests.internals.workers import backends, hashed_path, project_cleanup


def test_worker_deletes_the_refs_of_the_demo(
    deletions: type[Deletion], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenes, "PROJECTS", 3)
    assert refs_settings(tmp_path) == {"REPOSITORIES_ROOT": str(root)}
    (root / "@hashed").rmdir()
    root.rmdir()
    line = seed_refs(tmp_path)
    before = count_refs()
    backends.use_root(root)

    results = [run_sweep(project_cleanup, project) for project in (1, 2, 3)]

    assert line.startswith("3 bare git repositories with 78 refs each, and 246 refs to delete")
    assert before == {"pending": 246, "processed": 0, "refs in the repositories": 234}
    assert [result.outcome for result in results] == ["done"] * 3
    assert [result.counts["invalid"] for result in results] == [3, 3, 0]
    assert count_refs() == {"pending": 1, "processed": 245, "refs in the repositories": 10}
    bare = Bare.__new__(Bare)
    bare.path = root / hashed_path(3)
    assert bare.refs() == sorted(KEPT)
    assert bare.git("fsck", "--full") == ""
