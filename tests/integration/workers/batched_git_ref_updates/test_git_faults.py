"""A git program that is killed, hangs or refuses in the middle of a run (F9): what it confirmed is marked, nothing is
marked whose ref is still there, no other ref is touched, and the next run does the rest."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.integration.workers.batched_git_ref_updates.cleaned import SMALL
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, Pending
from tests.integration.workers.batched_git_ref_updates.repositories import Bare, MakeRepository, made
from tests.internals.engine import run_sweep
from tests.internals.workers import GitCli, backends, project_cleanup

LIVE = ["refs/heads/live", "refs/tags/live"]
#: Makes the program do this, in shell, at its third batch of five refs, and what git does at all others.
Program = Callable[[str], None]


@pytest.fixture
def bare(repository: MakeRepository, add_deletions: AddDeletions) -> Bare:
    """Repository with 25 refs to delete and two refs in use."""
    add_deletions(25)
    return repository(*(f"refs/heads/{number}" for number in range(1, 26)), *LIVE)


@pytest.fixture
def program(tmp_path: Path, root: Path) -> Program:
    def make(third: str) -> None:
        file, calls = tmp_path / "git", tmp_path / "calls"
        file.write_text(
            f"#!/bin/sh\necho >> '{calls}'\nif [ $(wc -l < '{calls}') -eq 3 ]; then {third}; fi\nexec git \"$@\"\n"
        )
        file.chmod(0o755)
        # Far above what git takes for five refs on a busy machine.
        backends.replace(deletion=GitCli(str(file), timedelta(seconds=5)))

    return make


@pytest.mark.parametrize(
    "third",
    [
        pytest.param("kill -9 $$", id="killed_before_it_deletes", marks=pytest.mark.slow),
        pytest.param('git "$@"; kill -9 $$', id="killed_when_it_has_deleted"),
        pytest.param("exec sleep 600", id="hangs_before_it_deletes", marks=pytest.mark.slow),
        pytest.param('git "$@"; exec sleep 600', id="hangs_when_it_has_deleted", marks=pytest.mark.slow),
        pytest.param('echo "fatal: No space left on device" >&2; exit 128', id="finds_the_disk_full"),
    ],
)
def test_crash_of_git_loses_and_repeats_nothing(bare: Bare, program: Program, pending: Pending, third: str) -> None:
    program(third)
    broken = run_sweep(SMALL, 1)
    rows, refs = set(pending()), set(bare.refs())
    # The program's third call is over: from now on it does what git does.
    again = run_sweep(SMALL, 1)

    assert (broken.outcome, broken.counts["total_deletes"], again.outcome) == ("failed", 10, "done")
    assert refs - set(LIVE) <= rows, "nothing is marked whose ref is still there"
    assert (bare.refs(), pending()) == (LIVE, [])
    assert broken.counts["total_deletes"] + again.counts["total_deletes"] == 25


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """Root folder of repositories that git reads and cannot write, also if the tests run as root."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root needs setpriv, to run git as another user")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        calls, program = root / "calls", root / "git"
        calls.touch()
        calls.chmod(0o666)
        user = "setpriv --reuid=65534 --regid=65534 --clear-groups" if os.geteuid() == 0 else ""
        program.write_text(f"#!/bin/sh\necho >> '{calls}'\nexec {user} git \"$@\"\n")
        program.chmod(0o755)
        (root / "@hashed").mkdir()
        backends.use_root(root)
        backends.replace(deletion=GitCli(str(program)))
        yield root
        backends.use_root(None)
        backends.replace()
        if os.geteuid() != 0:
            for below, _, _ in os.walk(root):
                os.chmod(below, 0o755)


def test_repository_without_write_permission_costs_one_git_process(
    as_nobody: Path, add_deletions: AddDeletions, pending: Pending
) -> None:
    bare = made(as_nobody, 1)
    bare.add_many((f"refs/heads/{number}" for number in range(1, 3001)), packed=False)
    (bare.path / "refs/heads").chmod(0o555)
    add_deletions(3000)

    result = run_sweep(project_cleanup, 1)

    assert result.outcome == "failed"
    assert result.reason is not None and result.reason.endswith("refs/heads/1.lock': Permission denied")
    assert (len((as_nobody / "calls").read_text()), len(pending())) == (1, 3000)


def test_locked_ref_fails_alone_and_other_refs_are_untouched(bare: Bare, program: Program, pending: Pending) -> None:
    lock = bare.lock("refs/heads/13")
    program("true")

    locked = run_sweep(SMALL, 1)
    rows, refs = pending(), bare.refs()
    lock.unlink()
    again = run_sweep(SMALL, 1)

    assert (locked.outcome, locked.counts["total_deletes"], locked.counts["failed"]) == ("done", 24, 1)
    assert (rows, sorted(refs)) == (["refs/heads/13"], sorted(["refs/heads/13", *LIVE]))
    assert (again.counts["total_deletes"], bare.refs(), pending()) == (1, LIVE, [])
