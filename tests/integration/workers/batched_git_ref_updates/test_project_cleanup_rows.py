"""Rows that other sessions change while their refs are deleted, and the events of marked rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, Final

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import events
from housekeeping.testing.assertions import assert_survives_kill
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.integration.workers.batched_git_ref_updates.cleaned import NONE, SMALL
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, AddRefs, Pending, Watched
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository
from tests.internals.engine import run_sweep
from tests.internals.ledger import NOW, Run
from tests.internals.workers import backends, project_cleanup


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


@pytest.mark.parametrize("code", ["45000", "42501", "55000", "0A000", "XX001"])
def test_unexpected_error_of_a_mark_costs_no_branch(
    repository: MakeRepository, add_deletions: AddDeletions, admin: Connection, code: str
) -> None:
    bare = repository("refs/heads/1")
    add_deletions(1)
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION 'still needed' USING ERRCODE = '{code}'; END $$;"
            f"CREATE TRIGGER refuse BEFORE UPDATE ON {Deletion._meta.table_name} "
            "FOR EACH ROW EXECUTE FUNCTION refuse()"
        )

    run_sweep(project_cleanup, 1)

    assert bare.refs() == ["refs/heads/1"]


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
