"""Results of rows with missing repositories and with locked, odd or invalid refs (document 58)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.workers.batched_git_ref_updates.cleaned import NONE, SMALL
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, AddRefs, Lines, Pending, Watched
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository
from tests.internals.engine import run_sweep
from tests.internals.workers import hashed_path, project_cleanup


def test_repository_path_is_the_hash_of_the_project() -> None:
    # document 58
    digest = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"

    assert str(hashed_path(1)) == f"@hashed/6b/86/{digest}.git"


def test_rows_of_a_missing_repository_are_processed(root: Path, add_deletions: AddDeletions, pending: Pending) -> None:
    add_deletions(3)

    result = run_sweep(project_cleanup, 1)

    assert (result.outcome, result.counts["total_deletes"], pending()) == ("done", 3, [])


def test_ref_deleted_meanwhile_counts_as_deleted(
    watched: Watched, repository: MakeRepository, add_deletions: AddDeletions, pending: Pending
) -> None:
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 6)))

    def meanwhile(number: int, refs: Sequence[str]) -> None:
        bare.git("update-ref", "-d", "refs/heads/3")

    watched.before = meanwhile
    add_deletions(5)

    assert run_sweep(SMALL, 1).counts["total_deletes"] == 5
    assert (bare.refs(), pending()) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_locked_ref_among_10_000_fails_alone(
    root: Path,
    repository: MakeRepository,
    add_deletions: AddDeletions,
    pending: Pending,
    reported: list[dict[str, Any]],
    lines: Lines,
    packed: bool,
) -> None:
    # エラー処理: a poison ref is logged, reported and counted; its row stays pending; the loop ends.
    bare = repository()
    bare.add_many((f"refs/heads/{number}" for number in range(1, 10_001)), packed=packed)
    bare.lock("refs/heads/5005")
    add_deletions(10_000)

    result = run_sweep(project_cleanup, 1)

    assert (result.outcome, result.counts) == ("done", {"total_deletes": 9_999, "invalid": 0, "failed": 1})
    assert bare.refs() == pending() == ["refs/heads/5005"]
    assert [(about["project_id"], about["ref"]) for about in reported] == [(1, "refs/heads/5005")]
    (line,) = lines("Record rejected")
    assert (line.levelname, line.record) == ("ERROR", {"id": 5005, "project_id": 1, "ref": "refs/heads/5005"})
    assert [line.alarm for line in lines("Alert")] == ["failed_rows"]


@pytest.mark.parametrize(
    "name",
    ["HEAD", "main", "refs/", "-d", "--stdin", "refs/heads/a\ndelete refs/heads/kept", "refs/heads/a..b", "", " "]
    + ["refs/heads/a.lock", "refs/heads/\x01", "refs/../../elsewhere"],
)
def test_invalid_ref_is_logged_counted_and_processed(
    watched: Watched, repository: MakeRepository, add_refs: AddRefs, pending: Pending, lines: Lines, name: str
) -> None:
    # It never reaches git, and a pending row would be retried forever.
    bare = repository("refs/heads/a", "refs/heads/kept")
    add_refs(name, "refs/heads/a")

    result = run_sweep(project_cleanup, 1)

    assert (result.outcome, result.counts) == ("done", {"total_deletes": 1, "invalid": 1, "failed": 0})
    assert (watched.batches, pending(), bare.refs()) == ([["refs/heads/a"]], [], ["refs/heads/kept"])
    (line,) = lines("Invalid ref name; row marked as processed")
    assert (line.levelname, line.id, line.project_id, line.ref) == ("WARNING", 1, 1, name)


#: The longest part of a path that a file can have, and git's lock file with ".lock" at its end.
FILE, LOCKED = 255, 250


@pytest.mark.parametrize("length", [LOCKED + 1, FILE, FILE + 1, 1000])
def test_name_too_long_for_a_file_is_invalid_and_processed(
    repository: MakeRepository, add_refs: AddRefs, pending: Pending, lines: Lines, length: int
) -> None:
    bare = repository("refs/heads/a", "refs/heads/kept")
    add_refs("refs/heads/" + "x" * length, "refs/heads/a")

    result = run_sweep(project_cleanup, 1)

    assert (result.outcome, result.counts) == ("done", {"total_deletes": 1, "invalid": 1, "failed": 0})
    assert (pending(), bare.refs()) == ([], ["refs/heads/kept"])
    (line,) = lines("Invalid ref name; row marked as processed")
    assert line.id == 1 and line.ref.startswith("refs/heads/xxx") and len(line.ref) <= 300
    assert all(len(line.error) <= 520 for line in lines("Batch of refs refused; bisecting"))


def test_longest_name_that_git_can_lock_is_deleted(
    repository: MakeRepository, add_refs: AddRefs, pending: Pending
) -> None:
    ref = "refs/heads/" + "x" * LOCKED
    bare = repository(ref)
    add_refs(ref)

    assert run_sweep(project_cleanup, 1).counts == {**NONE, "total_deletes": 1}
    assert (pending(), bare.refs()) == ([], [])


@pytest.mark.parametrize("length", [LOCKED + 1, FILE, FILE + 1, 1000])
def test_packed_ref_too_long_for_git_to_delete_stays_pending(
    repository: MakeRepository, add_refs: AddRefs, pending: Pending, lines: Lines, length: int
) -> None:
    # A clone packs such a ref without a file for it; git lists it and cannot lock it.
    ref = "refs/heads/" + "x" * length
    bare = repository()
    bare.add_many([ref, "refs/heads/a"], packed=True)
    add_refs(ref, "refs/heads/a")

    assert run_sweep(project_cleanup, 1).counts == {"total_deletes": 1, "invalid": 0, "failed": 1}
    assert (pending(), bare.refs()) == ([ref], [ref])
    (line,) = lines("Record rejected")
    assert "File name too long" in line.error and len(line.error) <= 300 and len(line.record["ref"]) <= 300


def test_long_name_below_a_packed_ref_is_invalid(
    repository: MakeRepository, add_refs: AddRefs, pending: Pending
) -> None:
    ref = "refs/heads/" + "x" * 300
    bare = repository()
    bare.add_many([f"{ref}/below"], packed=True)
    add_refs(ref)

    assert run_sweep(project_cleanup, 1).counts["failed"] == 0
    assert (pending(), bare.refs()) == ([], [f"{ref}/below"])


def test_path_too_long_for_the_system_is_invalid_and_processed(
    repository: MakeRepository, add_refs: AddRefs, pending: Pending
) -> None:
    repository("refs/heads/a")
    # 1024 characters of four bytes each, in parts that a file could have: over PATH_MAX.
    ref = ("refs/heads/" + ("\U0001f600" * 60 + "/") * 17)[:1024].rstrip("/")
    add_refs(ref)

    assert run_sweep(project_cleanup, 1).counts == {"total_deletes": 0, "invalid": 1, "failed": 0}
    assert pending() == []
