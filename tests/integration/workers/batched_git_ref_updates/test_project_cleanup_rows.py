"""Rows that other sessions change while their refs are deleted, and the events of marked rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from psycopg2.extensions import connection as Connection

from housekeeping.core import events
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger.models import NOW, Run
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from housekeeping.workers.batched_git_ref_updates.worker import project_cleanup
from tests.integration.conftest import Locked
from tests.integration.workers.batched_git_ref_updates.cleaned import NONE, SMALL
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, AddRefs, Pending, Watched
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository


def test_row_processed_meanwhile_is_not_counted(
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

    result = run_sweep(project_cleanup, 1)

    rows = {row.id: (row.status, row.updated_at.year) for row in Deletion.select()}
    assert result.counts == {**NONE, "total_deletes": 1}
    assert rows == {1: (2, 2020), 2: (1, 2025), 3: (1, 2025), 5: (2, datetime.now(UTC).year)}
    assert [row["id"] for about in told for row in about["rows"]] == [5]


def test_refused_row_processed_meanwhile_is_not_counted(
    watched: Watched, repository: MakeRepository, add_refs: AddRefs, admin: Connection
) -> None:
    repository("refs/heads/a").lock("refs/heads/a")
    add_refs("refs/heads/a")

    def meanwhile(number: int, refs: Sequence[str]) -> None:
        with admin.cursor() as cursor:
            cursor.execute(f"UPDATE {Deletion._meta.table_name} SET status = 2")

    watched.before = meanwhile

    assert run_sweep(project_cleanup, 1).counts == NONE


def test_locked_row_is_left_for_the_next_run(
    repository: MakeRepository, add_deletions: AddDeletions, locked: Locked, pending: Pending
) -> None:
    # 排他制御. Had it waited, lock_timeout would have failed the run.
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 4)))
    add_deletions(3)

    with locked(f"SELECT * FROM {Deletion._meta.table_name} WHERE id = 2 FOR UPDATE"):
        result = run_sweep(project_cleanup, 1)

    assert (result.outcome, result.counts["total_deletes"]) == ("done", 2)
    assert (bare.refs(), pending()) == ([], ["refs/heads/2"])
    assert run_sweep(project_cleanup, 1).counts["total_deletes"] == 1


def test_row_that_cannot_be_marked_fails_alone(
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

    result = run_sweep(project_cleanup, 1)

    assert (result.outcome, result.counts) == ("done", {"total_deletes": 9_999, "invalid": 0, "failed": 1})
    assert pending() == ["refs/heads/5005"]
    assert [about["id"] for about in reported] == [5005]


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


def test_failing_subscriber_does_not_affect_others(
    root: Path, add_deletions: AddDeletions, told: list[dict[str, Any]], reported: list[dict[str, Any]]
) -> None:
    def fail(sender: str, **about: Any) -> None:
        raise OSError("no mail today")

    add_deletions(25)
    with events.refs_deleted.connected_to(fail):
        result = run_sweep(SMALL, 1)

    assert (result.outcome, result.counts["total_deletes"]) == ("done", 25)
    assert [len(about["rows"]) for about in told] == [10, 10, 5]
    assert len(reported) == 3


def test_suspended_run_deletes_no_ref_after_another_took_over(
    watched: Watched, repository: MakeRepository, add_deletions: AddDeletions
) -> None:
    # The other run has processed the rows, and a user has pushed a branch of the same name since.
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 11)))

    def suspended(number: int, refs: Sequence[str]) -> None:
        if number == 1:
            Run.update(outcome="lost", finished_at=NOW).execute()

    watched.before = suspended
    add_deletions(10)

    result = run_sweep(SMALL, 1)

    assert (result.outcome, result.reason, len(watched.batches)) == ("lost_lease", "taken_over", 1)
    assert len(bare.refs()) == 5


def test_suspended_bisection_deletes_no_ref_after_another_took_over(
    watched: Watched, repository: MakeRepository, add_deletions: AddDeletions
) -> None:
    bare = repository(*(f"refs/heads/{number}" for number in range(1, 6)))
    bare.lock("refs/heads/1")

    def suspended(number: int, refs: Sequence[str]) -> None:
        if number == 1:
            Run.update(outcome="lost", finished_at=NOW).execute()

    watched.before = suspended
    add_deletions(5)

    assert run_sweep(SMALL, 1).reason == "taken_over"
    assert len(bare.refs()) == 5
