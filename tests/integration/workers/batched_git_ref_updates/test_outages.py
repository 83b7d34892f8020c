"""Cleanups while git, repositories, the database or Redis are unavailable: outcome, and no row marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

import pytest

from tests.integration.workers.batched_git_ref_updates.cleaned import SMALL
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, Pending, Watched
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository
from tests.internals.engine import run_sweep
from tests.internals.insight import plan
from tests.internals.workers import RefDeletionFailed, backends, hashed_path, project_cleanup


def test_without_a_root_the_run_fails_in_one_line_and_the_plan_works(
    add_deletions: AddDeletions, pending: Pending
) -> None:
    backends.use_root(None)
    add_deletions(3)

    result = run_sweep(project_cleanup, 1)

    assert (result.outcome, result.exit_code) == ("failed", 1)
    assert result.reason == (
        "HOUSEKEEPING_REPOSITORIES_ROOT is not set; it should be a folder such as /srv/git/repositories"
    )
    assert len(pending()) == 3
    assert plan(project_cleanup, 1).stale.rows == 3


@pytest.mark.parametrize("folder_is_left", [True, False])
def test_missing_root_does_not_count_as_missing_repositories(
    root: Path, add_deletions: AddDeletions, pending: Pending, folder_is_left: bool
) -> None:
    # An unmounted disk, which may leave an empty folder: were its repositories missing, every row would be marked.
    (root / "@hashed").rmdir()
    if not folder_is_left:
        root.rmdir()
    add_deletions(3)

    result = run_sweep(project_cleanup, 1)

    assert result.outcome == "failed"
    assert result.reason is not None and result.reason.endswith("which has no folder @hashed; is the disk mounted?")
    assert len(pending()) == 3


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


def test_inaccessible_repository_does_not_count_as_missing(
    root: Path, add_deletions: AddDeletions, pending: Pending
) -> None:
    # A file where a folder should be answers as a folder that may not be entered does, to root as well.
    (root / hashed_path(1)).parent.parent.write_text("no folder")
    add_deletions(3)

    result = run_sweep(project_cleanup, 1)

    assert result.outcome == "failed"
    assert result.reason is not None and "cannot be accessed" in result.reason
    assert len(pending()) == 3


def test_without_the_git_program_the_run_fails_and_nothing_is_marked(
    repository: MakeRepository, add_deletions: AddDeletions, pending: Pending, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository("refs/heads/1")
    add_deletions(3)
    monkeypatch.setenv("PATH", "/nowhere")

    result = run_sweep(project_cleanup, 1)

    assert result.outcome == "failed"
    assert result.reason == "the git program 'git' does not start: No such file or directory"
    assert result.error is not None, "its message is retried"
    assert len(pending()) == 3


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


def test_rows_are_marked_only_after_git_confirmed(
    watched: Watched, repository: MakeRepository, add_deletions: AddDeletions, pending_elsewhere: Pending
) -> None:
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 26)))
    seen: list[tuple[int, int]] = []
    watched.before = lambda number, refs: seen.append((len(pending_elsewhere()), len(bare.refs())))
    add_deletions(25)

    run_sweep(SMALL, 1)

    assert seen == [(25, 25), (25, 20), (15, 15), (15, 10), (5, 5)]


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


def test_error_in_a_custom_deletion_fails_the_run(
    add_deletions: AddDeletions, watched: Watched, pending: Pending, last_run: Callable[[], Any]
) -> None:
    def fail(number: int, refs: Sequence[str]) -> None:
        raise KeyError("storage-1")

    watched.before = fail
    add_deletions(2)

    assert run_sweep(project_cleanup, 1).outcome == "failed"
    assert (len(pending()), last_run().error) == (2, "KeyError: 'storage-1'")
