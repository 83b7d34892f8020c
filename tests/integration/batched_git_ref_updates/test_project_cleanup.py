"""The cleanup of one project (document 58, its follow-up; workers.md, 58): each test names what it keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping.foundation import events
from housekeeping.foundation.leases import ExclusiveLease
from housekeeping.sweeps.run import perform
from housekeeping.testing import ManualClock
from housekeeping.workers.batched_git_ref_updates import cleanup
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from housekeeping.workers.batched_git_ref_updates.worker import MAX_RUNTIME, project_cleanup
from tests.integration.batched_git_ref_updates.conftest import AddDeletions, Pending, Watched
from tests.integration.batched_git_ref_updates.repositories import MakeRepository
from tests.integration.conftest import Locked

AddRefs = Callable[..., None]
Lines = Callable[[str], list[Any]]

SMALL = dataclasses.replace(project_cleanup, options={"page_size": 10, "git_batch_size": 5, "max_deletes": 30})
NONE = {"total_deletes": 0, "invalid": 0, "failed": 0}


def test_the_refs_are_deleted_and_their_rows_processed(
    repository: MakeRepository, add_refs: AddRefs, clock: ManualClock
) -> None:
    # 概要: the refs asked for go, the rows say so, with updated_at.
    bare = repository("refs/heads/a", "refs/tags/b", "refs/heads/kept")
    add_refs("refs/heads/a", "refs/tags/b")

    result = perform(project_cleanup, 1, clock=clock)

    assert (result.outcome, result.counts) == ("done", {**NONE, "total_deletes": 2})
    assert bare.refs() == ["refs/heads/kept"]
    assert [(row.status, row.updated_at) for row in Deletion.select()] == [(2, clock.now())] * 2


def test_other_projects_and_processed_rows_are_left_alone(
    repository: MakeRepository, add_refs: AddRefs, admin: Connection
) -> None:
    first, second = repository("refs/heads/a", "refs/heads/b"), repository("refs/heads/a", project_id=2)
    add_refs("refs/heads/a", project_id=2)
    add_refs("refs/heads/a", "refs/heads/b")
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE {Deletion._meta.table_name} SET status = 2 WHERE id = 2")

    assert perform(project_cleanup, 1).counts["total_deletes"] == 1
    assert (first.refs(), second.refs()) == (["refs/heads/a"], ["refs/heads/a"])


@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 9, 10, 11, 25])
def test_every_ref_goes_whatever_their_number(
    watched: Watched, repository: MakeRepository, add_deletions: AddDeletions, pending: Pending, count: int
) -> None:
    # workers.md: pages, and batches of refs within them.
    bare = repository(*(f"refs/heads/{number}" for number in range(1, count + 1)))
    add_deletions(count)

    result = perform(SMALL, 1)

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
    # workers.md: until 10,000 rows or none; here 30. The next run does the rest.
    add_deletions(count)

    result = perform(SMALL, 1)

    assert (result.outcome, result.reason) == outcome
    assert result.counts["total_deletes"] == deletes
    assert len(pending()) == count - deletes


def test_what_is_invalid_or_refused_counts_towards_the_limit(
    repository: MakeRepository, add_deletions: AddDeletions
) -> None:
    # Or a project of nothing but locked refs would be walked to its end, however long.
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 41)))
    for number in range(1, 41):
        bare.lock(f"refs/heads/{number}")
    add_deletions(40)

    result = perform(SMALL, 1)

    assert (result.outcome, result.reason, result.counts["failed"]) == ("partial", "limit", 30)


def test_a_ref_asked_for_many_times_is_deleted_once(
    watched: Watched, repository: MakeRepository, add_refs: AddRefs, pending: Pending
) -> None:
    # workers.md: the refs, each once; a duplicate in a batch would make git refuse it.
    bare = repository("refs/heads/a", "refs/heads/b")
    add_refs("refs/heads/a", "refs/heads/b", "refs/heads/a", "refs/heads/a")

    result = perform(SMALL, 1)

    assert watched.batches == [["refs/heads/a", "refs/heads/b"]]
    assert (result.counts["total_deletes"], pending(), bare.refs()) == (4, [], [])


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


def test_a_row_processed_by_another_between_reading_and_marking_is_neither_touched_nor_counted(
    watched: Watched, repository: MakeRepository, add_deletions: AddDeletions, admin: Connection, told: list[Any]
) -> None:
    # トランザクション仕様: a record that changes in the gap is never overwritten.
    table = Deletion._meta.table_name
    repository("refs/heads/1")

    def meanwhile(number: int, refs: Sequence[str]) -> None:
        with admin.cursor() as cursor:
            cursor.execute(f"UPDATE {table} SET status = 2, updated_at = '2020-01-01 00:00:00+00' WHERE id = 1")
            cursor.execute(f"UPDATE {table} SET ref = 'refs/heads/another' WHERE id = 2")
            cursor.execute(f"UPDATE {table} SET project_id = 2 WHERE id = 3")
            cursor.execute(f"DELETE FROM {table} WHERE id = 4")

    watched.before = meanwhile
    add_deletions(5)

    result = perform(project_cleanup, 1)

    rows = {row.id: (row.status, row.updated_at.year) for row in Deletion.select()}
    assert result.counts == {**NONE, "total_deletes": 1}
    assert rows == {1: (2, 2020), 2: (1, 2025), 3: (1, 2025), 5: (2, datetime.now(UTC).year)}
    assert [row["id"] for about in told for row in about["rows"]] == [5]


def test_a_refused_row_that_another_has_processed_meanwhile_is_not_counted(
    watched: Watched, repository: MakeRepository, add_refs: AddRefs, admin: Connection
) -> None:
    repository("refs/heads/a").lock("refs/heads/a")
    add_refs("refs/heads/a")

    def meanwhile(number: int, refs: Sequence[str]) -> None:
        with admin.cursor() as cursor:
            cursor.execute(f"UPDATE {Deletion._meta.table_name} SET status = 2")

    watched.before = meanwhile

    assert perform(project_cleanup, 1).counts == NONE


def test_a_row_locked_elsewhere_is_left_for_the_next_run_and_not_waited_for(
    repository: MakeRepository, add_deletions: AddDeletions, locked: Locked, pending: Pending
) -> None:
    # 排他制御. Had it waited, lock_timeout would have failed the run.
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 4)))
    add_deletions(3)

    with locked(f"SELECT * FROM {Deletion._meta.table_name} WHERE id = 2 FOR UPDATE"):
        result = perform(project_cleanup, 1)

    assert (result.outcome, result.counts["total_deletes"]) == ("done", 2)
    assert (bare.refs(), pending()) == ([], ["refs/heads/2"])
    assert perform(project_cleanup, 1).counts["total_deletes"] == 1


def test_a_row_that_the_database_refuses_to_mark_costs_itself_only(
    root: Path, add_deletions: AddDeletions, admin: Connection, pending: Pending, reported: list[dict[str, Any]]
) -> None:
    add_deletions(10_000)
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN IF OLD.id = 5005 THEN RAISE EXCEPTION 'still needed'; END IF; RETURN NEW; END $$;"
            f"CREATE TRIGGER refuse BEFORE UPDATE ON {Deletion._meta.table_name} "
            "FOR EACH ROW EXECUTE FUNCTION refuse()"
        )

    result = perform(project_cleanup, 1)

    assert (result.outcome, result.counts) == ("done", {"total_deletes": 9_999, "invalid": 0, "failed": 1})
    assert pending() == ["refs/heads/5005"]
    assert [about["id"] for about in reported] == [5005]


def test_subscribers_are_told_of_deleted_refs_after_the_commit(
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
        result = perform(project_cleanup, 1)

    (about,) = told
    assert (about["worker"], about["run_id"]) == (project_cleanup.name, result.run_id)
    assert about["rows"] == [
        {"id": 1, "project_id": 1, "ref": "refs/heads/a"},
        {"id": 4, "project_id": 1, "ref": "refs/heads/missing"},
    ]
    assert seen == [3]


def test_a_subscriber_that_raises_harms_neither_the_run_nor_the_others(
    root: Path, add_deletions: AddDeletions, told: list[dict[str, Any]], reported: list[dict[str, Any]]
) -> None:
    def fail(sender: str, **about: Any) -> None:
        raise OSError("no mail today")

    add_deletions(25)
    with events.refs_deleted.connected_to(fail):
        result = perform(SMALL, 1)

    assert (result.outcome, result.counts["total_deletes"]) == ("done", 25)
    assert [len(about["rows"]) for about in told] == [10, 10, 5]
    assert len(reported) == 3


def test_a_second_run_changes_nothing(
    repository: MakeRepository, add_deletions: AddDeletions, told: list[dict[str, Any]]
) -> None:
    # 備考: idempotent!
    repository()
    add_deletions(5)
    perform(project_cleanup, 1)
    before = list(Deletion.select().order_by(Deletion.id).dicts())
    told.clear()

    assert perform(project_cleanup, 1).counts == NONE
    assert list(Deletion.select().order_by(Deletion.id).dicts()) == before
    assert told == []


def test_the_run_stops_when_its_time_is_over_and_the_next_does_the_rest(
    root: Path, add_deletions: AddDeletions, pending: Pending
) -> None:
    # パフォーマンス要件
    add_deletions(30)

    result = perform(SMALL, 1, clock=ManualClock(tick=2 * MAX_RUNTIME))

    assert (result.outcome, result.reason) == ("partial", "out_of_time")
    assert result.counts["total_deletes"] == 5, "the batch in hand is finished, and its rows marked"
    assert perform(SMALL, 1).counts["total_deletes"] == 25
    assert pending() == []


def test_slow_batches_are_settled_before_the_run_looks_dead(
    watched: Watched, add_deletions: AddDeletions, monkeypatch: pytest.MonkeyPatch, pending: Pending
) -> None:
    # design.md, State in PostgreSQL: a run whose heartbeat is older than a minute is taken for lost.
    monkeypatch.setattr(cleanup, "HEARTBEAT", timedelta())
    left: list[int] = []
    watched.before = lambda number, refs: left.append(len(pending()))
    add_deletions(20)

    assert perform(SMALL, 1).counts["total_deletes"] == 20
    assert left == [20, 15, 10, 5]


def test_the_lease_is_the_projects_own(root: Path, add_deletions: AddDeletions, pending: Pending) -> None:
    # 排他制御: 10 minutes, never waits; other projects are cleaned meanwhile.
    add_deletions(2, project="n")
    lease = project_cleanup.lease
    assert lease is not None

    with ExclusiveLease("batched_git_ref_updates/project_cleanup/1", timedelta(minutes=10)):
        first, second = perform(project_cleanup, 1), perform(project_cleanup, 2)

    assert (first.outcome, first.reason, first.exit_code) == ("skipped", "lease_held", 0)
    assert second.outcome == "done"
    assert pending() == ["refs/heads/1"]
    assert (lease.key_for(7), lease.ttl) == ("batched_git_ref_updates/project_cleanup/7", timedelta(minutes=10))


def test_the_limits_and_the_labels_are_the_documents() -> None:
    # 備考; workers.md, 58
    assert project_cleanup.options == {"page_size": 1000, "git_batch_size": 100, "max_deletes": 10_000}
    assert (project_cleanup.queue, project_cleanup.schedule) == ("git_refs", None)
    assert (project_cleanup.feature_category, project_cleanup.data_consistency) == ("gitaly", "delayed")
    assert project_cleanup.counts == ("total_deletes", "invalid", "failed")
    assert (project_cleanup.takes_argument, project_cleanup.read_argument("42")) == ("project id", 42)
