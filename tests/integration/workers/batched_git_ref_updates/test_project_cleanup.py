"""Cleanup of one project (document 58, its follow-up): its rows, its refs, and rows that other sessions change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePath
from typing import Any, Final

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import ExclusiveLease, events
from housekeeping.testing.assertions import assert_survives_kill
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.database_times import DatabaseTimes
from tests.integration.workers.batched_git_ref_updates.cleaned import NONE, SMALL
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, AddRefs, Lines, Pending, Watched
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository
from tests.internals.core import WorkerSettings
from tests.internals.engine import run_sweep
from tests.internals.ledger import NOW, Run
from tests.internals.workers import backends, cleanup, hashed_path, project_cleanup


def test_refs_are_deleted_and_rows_processed(
    repository: MakeRepository, add_refs: AddRefs, times: DatabaseTimes
) -> None:
    # 概要: the refs asked for go, the rows say so, with updated_at.
    bare = repository("refs/heads/a", "refs/tags/b", "refs/heads/kept")
    add_refs("refs/heads/a", "refs/tags/b")

    result = run_sweep(project_cleanup.configured(WorkerSettings(page_size=1)), 1, on_batch=times.note)

    assert (result.outcome, result.counts) == ("done", {**NONE, "total_deletes": 2})
    assert bare.refs() == ["refs/heads/kept"]
    rows = Deletion.select().order_by(Deletion.id)
    assert [(row.status, times.batch_of(row.updated_at)) for row in rows] == [(2, 0), (2, 1)]


def test_other_projects_and_processed_rows_are_left_alone(
    repository: MakeRepository, add_refs: AddRefs, admin: Connection
) -> None:
    first, second = repository("refs/heads/a", "refs/heads/b"), repository("refs/heads/a", project_id=2)
    add_refs("refs/heads/a", project_id=2)
    add_refs("refs/heads/a", "refs/heads/b")
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE {Deletion._meta.table_name} SET status = 2 WHERE id = 2")

    assert run_sweep(project_cleanup, 1).counts["total_deletes"] == 1
    assert (first.refs(), second.refs()) == (["refs/heads/a"], ["refs/heads/a"])


@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 9, 10, 11, 25])
def test_all_refs_are_deleted(
    watched: Watched, repository: MakeRepository, add_deletions: AddDeletions, pending: Pending, count: int
) -> None:
    # Pages, and batches of refs within them.
    bare = repository(*(f"refs/heads/{number}" for number in range(1, count + 1)))
    add_deletions(count)

    result = run_sweep(SMALL, 1)

    assert (result.outcome, result.counts["total_deletes"]) == ("done", count)
    assert (bare.refs(), pending()) == ([], [])
    assert all(len(batch) <= 5 for batch in watched.batches)


@pytest.mark.parametrize(
    ("count", "outcome", "deletes"),
    [
        (29, ("done", None), 29),
        (30, ("done", None), 30),
        (31, ("partial", "limit"), 30),
        (95, ("partial", "limit"), 30),
    ],
)
def test_a_run_ends_at_its_limit_of_rows(
    root: Path, add_deletions: AddDeletions, pending: Pending, count: int, outcome: tuple[str, str], deletes: int
) -> None:
    # Up to 10,000 rows a run; here 30. The next run continues.
    add_deletions(count)

    result = run_sweep(SMALL, 1)

    assert (result.outcome, result.reason) == outcome
    assert result.counts["total_deletes"] == deletes
    assert len(pending()) == count - deletes


@pytest.mark.slow
def test_invalid_and_refused_rows_count_towards_the_limit(
    repository: MakeRepository, add_deletions: AddDeletions
) -> None:
    # Or a project of nothing but locked refs would be walked to its end, however long.
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 41)))
    for number in range(1, 41):
        bare.lock(f"refs/heads/{number}")
    add_deletions(40)

    result = run_sweep(SMALL, 1)

    assert (result.outcome, result.reason, result.counts["failed"]) == ("partial", "limit", 30)


def test_duplicate_requests_delete_the_ref_once(
    watched: Watched, repository: MakeRepository, add_refs: AddRefs, pending: Pending
) -> None:
    # Each ref once: git refuses a batch with a duplicate.
    bare = repository("refs/heads/a", "refs/heads/b")
    add_refs("refs/heads/a", "refs/heads/b", "refs/heads/a", "refs/heads/a")

    result = run_sweep(SMALL, 1)

    assert watched.batches == [["refs/heads/a", "refs/heads/b"]]
    assert (result.counts["total_deletes"], pending(), bare.refs()) == (4, [], [])


def test_slow_batches_are_committed_in_time_for_the_heartbeat(
    watched: Watched, add_deletions: AddDeletions, monkeypatch: pytest.MonkeyPatch, pending_elsewhere: Pending
) -> None:
    # A run whose heartbeat is older than a minute counts as lost.
    monkeypatch.setattr(cleanup, "HEARTBEAT", timedelta())
    left: list[int] = []
    watched.before = lambda number, refs: left.append(len(pending_elsewhere()))
    add_deletions(20)

    assert run_sweep(SMALL, 1).counts["total_deletes"] == 20
    assert left == [20, 15, 10, 5]


def test_lease_is_per_project(root: Path, add_deletions: AddDeletions, pending: Pending) -> None:
    # 排他制御: 10 minutes, never waits; other projects are cleaned meanwhile.
    add_deletions(2, project="n")
    lease = project_cleanup.lease
    assert lease is not None

    with ExclusiveLease("batched_git_ref_updates/project_cleanup/1", timedelta(minutes=10)):
        first, second = run_sweep(project_cleanup, 1), run_sweep(project_cleanup, 2)

    assert (first.outcome, first.reason, first.exit_code) == ("skipped", "lease_held", 0)
    assert second.outcome == "done"
    assert pending() == ["refs/heads/1"]
    assert (lease.key_for(7), lease.ttl) == ("batched_git_ref_updates/project_cleanup/7", timedelta(minutes=10))


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


class Between:
    """Repositories with an action of the test between the read of a page and its transaction."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._located = backends.repositories
        self._action = action

    def locate(self, project_id: int) -> PurePath:
        self._action()
        return self._located.locate(project_id)


def test_row_processed_meanwhile_is_not_counted(
    root: Path, repository: MakeRepository, add_deletions: AddDeletions, admin: Connection, told: list[Any]
) -> None:
    # トランザクション仕様: a record that changes in the gap is never overwritten.
    table = Deletion._meta.table_name
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 6)))

    def meanwhile() -> None:
        with admin.cursor() as cursor:
            cursor.execute(
                f"UPDATE {table} SET status = 2, updated_at = '2020-01-01 00:00:00+00' WHERE id = 1 AND status = 1"
            )
            cursor.execute(f"UPDATE {table} SET ref = 'refs/heads/another' WHERE id = 2")
            cursor.execute(f"UPDATE {table} SET project_id = 2 WHERE id = 3")
            cursor.execute(f"DELETE FROM {table} WHERE id = 4")

    backends.replace(repositories=Between(meanwhile))
    add_deletions(5)

    result = run_sweep(project_cleanup, 1)

    rows = {row.id: (row.status, row.updated_at.year) for row in Deletion.select()}
    assert result.counts == {**NONE, "total_deletes": 1}
    assert rows == {1: (2, 2020), 2: (1, 2025), 3: (1, 2025), 5: (2, datetime.now(UTC).year)}
    assert [row["id"] for about in told for row in about["rows"]] == [5]
    assert bare.refs() == [f"refs/heads/{number}" for number in range(1, 5)], "only the ref of the marked row is gone"


#: What keeps row 2 from being marked: statements for the table's name.
_UNMARKABLE: Final = {
    "trigger": "CREATE TRIGGER refuse BEFORE UPDATE ON {} FOR EACH ROW EXECUTE FUNCTION refuse()",
    "constraint": "ALTER TABLE {} ADD CONSTRAINT stays CHECK (id <> 2 OR status = 1)",
    "deferred_trigger": "CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE ON {} DEFERRABLE INITIALLY DEFERRED "
    "FOR EACH ROW EXECUTE FUNCTION refuse()",
    "undone_update": "CREATE TRIGGER undo BEFORE UPDATE ON {} FOR EACH ROW WHEN (OLD.id = 2) EXECUTE FUNCTION undo()",
    "ignored_update": "CREATE TRIGGER skip BEFORE UPDATE ON {} FOR EACH ROW WHEN (OLD.id = 2) EXECUTE FUNCTION skip()",
}


@pytest.mark.parametrize("cause", _UNMARKABLE)
def test_branch_of_a_row_that_cannot_be_marked_stays(
    repository: MakeRepository, add_deletions: AddDeletions, admin: Connection, pending: Pending, cause: str
) -> None:
    bare = repository("refs/heads/1", "refs/heads/2", "refs/heads/3")
    add_deletions(3)
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN IF OLD.id = 2 THEN RAISE EXCEPTION 'still needed'; END IF; RETURN NEW; END $$;"
            "CREATE FUNCTION undo() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN OLD; END $$;"
            "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;"
            + _UNMARKABLE[cause].format(Deletion._meta.table_name)
        )

    first = run_sweep(project_cleanup, 1)
    after_first = bare.refs()
    add_deletions(1, "'refs/heads/4'")
    second = run_sweep(project_cleanup, 1)

    assert (first.outcome, first.counts) == ("done", {"total_deletes": 2, "invalid": 0, "failed": 1})
    assert (second.outcome, second.counts) == ("done", {"total_deletes": 1, "invalid": 0, "failed": 1})
    assert after_first == bare.refs() == pending() == ["refs/heads/2"], "marked rows only lose their refs"


def test_rows_of_refs_that_git_refuses_are_not_announced_as_deleted(
    repository: MakeRepository, add_deletions: AddDeletions, pending: Pending
) -> None:
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 4)))
    bare.lock("refs/heads/2")
    add_deletions(3)
    kept: list[list[str]] = []

    def handler(connection: Any, rows: list[dict[str, Any]], *, worker: str, run_id: int | None) -> None:
        kept.append([row["ref"] for row in rows])

    events.on(events.refs_deleted, handler, within_transaction=True)
    try:
        run_sweep(project_cleanup, 1)
    finally:
        events.off(events.refs_deleted, handler)

    assert kept[-1] == ["refs/heads/1", "refs/heads/3"], "the first call was undone with its transaction"
    assert pending() == ["refs/heads/2"]


@pytest.mark.slow
def test_killed_run_deletes_only_refs_of_rows_that_it_could_mark(
    repository: MakeRepository, add_deletions: AddDeletions, admin: Connection, pending: Pending, root: Path
) -> None:
    refs = [f"refs/heads/{number}" for number in range(1, 7)]
    bare = repository(*refs)
    add_deletions(6)
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN IF OLD.id = 2 THEN RAISE EXCEPTION 'still needed'; END IF; RETURN NEW; END $$;"
            f"CREATE TRIGGER refuse BEFORE UPDATE ON {Deletion._meta.table_name} "
            "FOR EACH ROW EXECUTE FUNCTION refuse()"
        )

    def restore() -> None:
        bare.remove()
        repository(*refs)

    points = assert_survives_kill(
        dataclasses.replace(SMALL, options={**SMALL.options, "page_size": 3}),
        1,
        ignoring=["updated_at"],
        outside=bare.refs,
        restore=restore,
    )

    assert bare.refs() == ["refs/heads/2"]
    assert any("git" in point for point in points) and any("COMMIT" in point for point in points)


def test_event_for_deleted_refs_is_sent_after_the_commit(
    repository: MakeRepository, add_refs: AddRefs, told: list[dict[str, Any]], admin: Connection
) -> None:
    repository("refs/heads/a", "refs/heads/locked").lock("refs/heads/locked")
    add_refs("refs/heads/a", "not a ref", "refs/heads/locked", "refs/heads/missing")
    seen: list[int] = []

    def look(sender: str, **about: Any) -> None:
        with admin.cursor() as cursor:
            cursor.execute(f"SELECT count(*) FROM {Deletion._meta.table_name} WHERE status = 2")
            seen.append(cursor.fetchall()[0][0])

    with events.refs_deleted.connected_to(look):
        result = run_sweep(project_cleanup, 1)

    (about,) = told
    assert (about["worker"], about["run_id"]) == (project_cleanup.name, result.run_id)
    assert about["rows"] == [
        {"id": 1, "project_id": 1, "ref": "refs/heads/a"},
        {"id": 4, "project_id": 1, "ref": "refs/heads/missing"},
    ]
    assert seen == [3]


@pytest.mark.parametrize("is_bisected", [False, True])
def test_suspended_run_deletes_no_ref_after_another_took_over(
    watched: Watched, repository: MakeRepository, add_deletions: AddDeletions, is_bisected: bool
) -> None:
    # The other run has processed the rows, and a user has pushed a branch of the same name since.
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 11)))
    if is_bisected:
        bare.lock("refs/heads/1")

    def suspended(number: int, refs: Sequence[str]) -> None:
        if number == 1:
            Run.update(outcome="lost", finished_at=NOW).execute()

    watched.before = suspended
    add_deletions(10)

    result = run_sweep(SMALL, 1)

    assert (result.outcome, result.reason, len(watched.batches)) == ("lost_lease", "taken_over", 1)
    assert len(bare.refs()) == (10 if is_bisected else 5)
