"""Cleanups while git or repositories are unavailable, or git is killed, hangs or refuses within a run (F9).

What git has confirmed is marked, no row is marked whose ref is still there, no other ref is touched, and the next run
does the rest."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any, Final

import pytest

from tests.integration.workers.batched_git_ref_updates.cleaned import SMALL
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, Pending, Watched
from tests.integration.workers.batched_git_ref_updates.repositories import Bare, MakeRepository, made
from tests.internals.engine import run_sweep
from tests.internals.insight import plan
from tests.internals.workers import GitCli, RefDeletionFailed, backends, hashed_path, project_cleanup


def no_root_is_set(root: Path, patch: pytest.MonkeyPatch) -> None:
    backends.use_root(None)


def disk_is_not_mounted(root: Path, patch: pytest.MonkeyPatch) -> None:
    # It may leave an empty folder: were its repositories missing, every row would be marked.
    (root / "@hashed").rmdir()


def root_is_missing(root: Path, patch: pytest.MonkeyPatch) -> None:
    disk_is_not_mounted(root, patch)
    root.rmdir()


def repository_is_inaccessible(root: Path, patch: pytest.MonkeyPatch) -> None:
    # A file where a folder should be answers as a folder that may not be entered does, to root as well.
    (root / hashed_path(1)).parent.parent.write_text("no folder")


def git_is_missing(root: Path, patch: pytest.MonkeyPatch) -> None:
    made(root, 1, "refs/heads/1")
    patch.setenv("PATH", "/nowhere")


#: What a run says of it.
REASONS: Final[dict[Callable[[Path, pytest.MonkeyPatch], None], str]] = {
    no_root_is_set: "HOUSEKEEPING_REPOSITORIES_ROOT is not set; it should be a folder such as /srv/git/repositories",
    disk_is_not_mounted: "which has no folder @hashed; is the disk mounted?",
    root_is_missing: "which has no folder @hashed; is the disk mounted?",
    repository_is_inaccessible: "cannot be accessed",
    git_is_missing: "the git program 'git' does not start: No such file or directory",
}


@pytest.mark.parametrize("outage", REASONS)
def test_run_without_git_or_repositories_fails_and_marks_no_row(
    root: Path,
    add_deletions: AddDeletions,
    pending: Pending,
    monkeypatch: pytest.MonkeyPatch,
    outage: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    add_deletions(3)
    outage(root, monkeypatch)

    result = run_sweep(project_cleanup, 1)

    assert (result.outcome, result.exit_code, len(pending())) == ("failed", 1, 3)
    assert result.reason is not None and REASONS[outage] in result.reason and "\n" not in result.reason
    assert result.error is not None, "its message is retried"
    assert plan(project_cleanup, 1).stale.rows == 3


def test_root_lost_during_a_run_does_not_count_as_missing_repositories(
    root: Path, watched: Watched, repository: MakeRepository, add_deletions: AddDeletions, pending: Pending
) -> None:
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 11)))
    add_deletions(10)

    def unmount(number: int, refs: Sequence[str]) -> None:
        if number == 2:
            root.rename(root.with_name("unmounted"))
            root.mkdir()

    watched.before = unmount

    result = run_sweep(SMALL, 1)

    assert (result.outcome, result.counts["total_deletes"]) == ("failed", 0)
    assert result.reason is not None and result.reason.endswith("is the disk mounted?")
    root.rmdir()
    root.with_name("unmounted").rename(root)
    assert (len(pending()), len(bare.refs())) == (10, 5)
    assert run_sweep(SMALL, 1).counts["total_deletes"] == 10
    assert bare.refs() == []


def test_locked_packed_refs_fail_the_run_and_the_next_recovers(
    repository: MakeRepository, add_deletions: AddDeletions, pending: Pending, reported: list[dict[str, Any]]
) -> None:
    bare = repository("refs/heads/1", "refs/heads/2")
    bare.pack()
    lock = bare.path / "packed-refs.lock"
    lock.touch()
    add_deletions(2)

    first = run_sweep(project_cleanup, 1)
    lock.unlink()
    second = run_sweep(project_cleanup, 1)

    assert first.outcome == "failed"
    assert first.reason is not None and "packed-refs.lock': File exists" in first.reason
    assert (first.counts["failed"], len(reported)) == (0, 1), "no single row is at fault"
    assert (second.outcome, second.counts["total_deletes"], pending(), bare.refs()) == ("done", 2, [], [])


def test_only_refs_confirmed_before_a_failure_are_marked(
    watched: Watched, add_deletions: AddDeletions, pending: Pending
) -> None:
    def fail(number: int, refs: Sequence[str]) -> None:
        if number >= 4:
            raise RefDeletionFailed("the disk is full")

    watched.before = fail
    add_deletions(30)

    result = run_sweep(SMALL, 1)

    assert (result.outcome, result.reason, result.counts["total_deletes"]) == ("failed", "the disk is full", 15)
    assert pending() == [f"refs/heads/{number}" for number in range(16, 31)]


def test_application_can_replace_the_backends(add_deletions: AddDeletions, root: Path, pending: Pending) -> None:
    asked: list[tuple[PurePath, list[str]]] = []

    class Elsewhere:
        def locate(self, project_id: int) -> PurePath:
            return PurePath(f"storage-1/{project_id}")

    class Client:
        def delete(self, repository: PurePath, refs: Sequence[str]) -> None:
            asked.append((repository, list(refs)))

    backends.replace(repositories=Elsewhere(), deletion=Client())
    add_deletions(2)

    assert run_sweep(project_cleanup, 1).counts["total_deletes"] == 2
    assert asked == [(PurePath("storage-1/1"), ["refs/heads/1", "refs/heads/2"])]
    assert pending() == []


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
