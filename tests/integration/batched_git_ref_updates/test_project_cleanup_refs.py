"""Repositories that are away, and refs that are locked, odd or none (workers.md, 58): what becomes of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from housekeeping.sweeps.run import perform
from housekeeping.workers.batched_git_ref_updates.repositories import hashed_path
from housekeeping.workers.batched_git_ref_updates.worker import project_cleanup
from tests.integration.batched_git_ref_updates.cleaned import NONE, SMALL
from tests.integration.batched_git_ref_updates.conftest import AddDeletions, AddRefs, Lines, Pending, Watched
from tests.integration.batched_git_ref_updates.repositories import MakeRepository


def test_a_repository_lies_where_its_projects_hash_says() -> None:
    # workers.md, 58
    digest = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"

    assert str(hashed_path(1)) == f"@hashed/6b/86/{digest}.git"


def test_a_symbolic_ref_goes_and_its_target_stays(repository: MakeRepository, add_refs: AddRefs) -> None:
    bare = repository("refs/heads/target")
    bare.git("symbolic-ref", "refs/heads/alias", "refs/heads/target")
    add_refs("refs/heads/alias")

    assert perform(project_cleanup, 1).counts["total_deletes"] == 1
    assert bare.refs() == ["refs/heads/target"]


def test_rows_of_a_missing_repository_are_processed(root: Path, add_deletions: AddDeletions, pending: Pending) -> None:
    add_deletions(3)

    result = perform(project_cleanup, 1)

    assert (result.outcome, result.counts["total_deletes"], pending()) == ("done", 3, [])


def test_a_repository_that_vanishes_during_the_run_has_no_refs_left(
    watched: Watched, repository: MakeRepository, add_deletions: AddDeletions, pending: Pending
) -> None:
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 16)))
    watched.before = lambda number, refs: bare.remove() if number == 2 else None
    add_deletions(15)

    result = perform(SMALL, 1)

    assert (result.outcome, result.counts["total_deletes"], pending()) == ("done", 15, [])


def test_a_ref_deleted_by_others_meanwhile_is_fine(
    watched: Watched, repository: MakeRepository, add_deletions: AddDeletions, pending: Pending
) -> None:
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 6)))

    def meanwhile(number: int, refs: Sequence[str]) -> None:
        bare.git("update-ref", "-d", "refs/heads/3")

    watched.before = meanwhile
    add_deletions(5)

    assert perform(SMALL, 1).counts["total_deletes"] == 5
    assert (bare.refs(), pending()) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_a_locked_ref_among_10_000_costs_itself_only(
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

    result = perform(project_cleanup, 1)

    assert (result.outcome, result.counts) == ("done", {"total_deletes": 9_999, "invalid": 0, "failed": 1})
    assert bare.refs() == pending() == ["refs/heads/5005"]
    assert [(about["project_id"], about["ref"]) for about in reported] == [(1, "refs/heads/5005")]
    (line,) = lines("A record could not be settled")
    assert (line.levelname, line.record) == ("ERROR", {"id": 5005, "project_id": 1, "ref": "refs/heads/5005"})
    assert [line.alarm for line in lines("Alarm")] == ["failed_rows"]


def test_the_next_run_takes_what_was_locked(repository: MakeRepository, add_refs: AddRefs, pending: Pending) -> None:
    # 障害時対応
    bare = repository("refs/heads/a", "refs/heads/b")
    lock = bare.lock("refs/heads/a")
    add_refs("refs/heads/a", "refs/heads/b")
    perform(project_cleanup, 1)
    lock.unlink()

    assert perform(project_cleanup, 1).counts == {**NONE, "total_deletes": 1}
    assert (bare.refs(), pending()) == ([], [])


def test_a_ref_that_would_be_a_folder_of_others_is_not_there(
    repository: MakeRepository, add_refs: AddRefs, pending: Pending
) -> None:
    bare = repository("refs/heads/a/b", "refs/heads/c")
    add_refs("refs/heads/a", "refs/heads/c/d", "refs/heads/c")

    assert perform(project_cleanup, 1).counts == {**NONE, "total_deletes": 3}
    assert (bare.refs(), pending()) == (["refs/heads/a/b"], [])


@pytest.mark.parametrize(
    "name",
    ["HEAD", "main", "refs/", "-d", "--stdin", "refs/heads/a\ndelete refs/heads/kept", "refs/heads/a..b", "", " "]
    + ["refs/heads/a.lock", "refs/heads/\x01", "refs/../../elsewhere", "refs/heads/" + "x" * 1000 + "~1"],
)
def test_what_cannot_be_a_ref_is_logged_counted_and_processed(
    watched: Watched, repository: MakeRepository, add_refs: AddRefs, pending: Pending, lines: Lines, name: str
) -> None:
    # workers.md: it never reaches git, and would come back for ever were it left pending.
    bare = repository("refs/heads/a", "refs/heads/kept")
    add_refs(name, "refs/heads/a")

    result = perform(project_cleanup, 1)

    assert (result.outcome, result.counts) == ("done", {"total_deletes": 1, "invalid": 1, "failed": 0})
    assert (watched.batches, pending(), bare.refs()) == ([["refs/heads/a"]], [], ["refs/heads/kept"])
    (line,) = lines("Not a ref that can be deleted")
    assert (line.levelname, line.id, line.project_id, line.ref) == ("WARNING", 1, 1, name)
