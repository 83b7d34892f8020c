"""Holds: stale rows that stay, in runs, plans, backlogs and every recheck."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from typing import Any, Final

import pytest
from peewee import SQL, fn
from psycopg2.extensions import connection as Connection

from housekeeping import Call, Delete, Guard, Sweep
from housekeeping.testing.assertions import assert_idempotent
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.pausing import changed_in_the_gap, pausing
from tests.integration.sweeps.documents import DOCUMENTS, NOW, Document, LegalHold, held_users, left
from tests.integration.sweeps.documents import documents as documents
from tests.internals.engine import fingerprint, run_sweep
from tests.internals.insight import as_json, dry_run, plan, worker_status
from tests.internals.ledger import Counts
from tests.internals.sweeps import Backlog, TableStage
from tests.session_settings import NEEDS_SESSION

#: The ways to write a hold of the users 2 and 5.
FORMS: Final[dict[str, Callable[[Any], Any]]] = {
    "condition on another table": lambda row: LegalHold.user_id == row.user_id,
    "query": lambda row: held_users(),
    "exists": lambda row: fn.EXISTS(held_users()),
    "in": lambda row: row.user_id.in_(LegalHold.select(LegalHold.user_id)),
    "column": lambda row: row.on_hold,
    "comparison": lambda row: row.on_hold == True,  # noqa: E712
    "negation": lambda row: ~(row.on_hold == False),  # noqa: E712
    "SQL": lambda row: SQL("on_hold OR user_id < 0"),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_on_hold_stay_and_rows_where_it_is_null_go(documents: None, clock: ManualClock, form: str) -> None:
    sweep = changed(DOCUMENTS, hold=lambda row: FORMS[form](row))

    planned, dry = plan(sweep, clock=clock), dry_run(sweep, clock=clock)
    result = run_sweep(sweep, clock=clock)

    assert (planned.stale, planned.held, planned.batches) == (Backlog(3), Backlog(2), 2)
    assert planned.as_json()["held"] == planned.as_json()["stages"][0]["held"] == 2
    assert [row["id"] for row in planned.stages[0][0].samples] == [1, 3, 4]
    assert dry.counts["deleted_rows"] == result.counts["deleted_rows"] == 3
    assert (result.outcome, left()) == ("done", [2, 5, 6])


def test_hold_applies_to_both_sides_of_or_in_a_predicate_in_sql(documents: None, clock: ManualClock) -> None:
    sweep = changed(DOCUMENTS, stale=lambda row, now: SQL("user_id < 3 OR expires_at <= %s", (now,)))

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["deleted_rows"], left()) == ("done", 3, [2, 5, 6])


def test_status_shows_held_rows_beside_the_backlog(documents: None, clock: ManualClock) -> None:
    before = worker_status(DOCUMENTS, clock.now(), UTC)
    run_sweep(DOCUMENTS, clock=clock)
    after = worker_status(DOCUMENTS, clock.now(), UTC)
    without = worker_status(changed(DOCUMENTS, hold=None), clock.now(), UTC)

    assert (before.waiting, before.held, after.waiting, after.held) == (Backlog(3), Backlog(2), Backlog(0), Backlog(2))
    assert (as_json(after)["held"], as_json(after)["held_exact"], after.oldest) == (2, True, None)
    assert (without.held, as_json(without)["held"]) == (None, None)


def test_count_of_held_rows_stops_at_its_limit(documents: None, clock: ManualClock) -> None:
    (stage,) = DOCUMENTS.stages_for_run()
    assert isinstance(stage, TableStage)

    counted = [stage.plan(clock.now(), limit).held for limit in (4, 5, 6)]

    assert counted[1:] == [Backlog(2), Backlog(2)]
    assert counted[0] is not None and not counted[0].exact


def test_next_batch_of_a_prepared_statement_honors_a_new_hold(documents: None, clock: ManualClock) -> None:
    one_by_one = changed(DOCUMENTS, batch=1)

    def set_hold(counts: Counts) -> None:
        if counts["batches"] == 2:
            LegalHold.create(user_id=4)

    run_sweep(one_by_one, clock=clock, on_batch=set_hold)

    assert left() == [2, 4, 5, 6]


@pytest.mark.parametrize("at", [1, 4], ids=["first batch", "second batch"])
def test_row_put_on_hold_after_the_snapshot_is_judged_again(
    documents: None, admin: Connection, clock: ManualClock, at: int
) -> None:
    sweep = pausing(changed(DOCUMENTS, hold=lambda row: row.on_hold), Document.id, at)

    with changed_in_the_gap(admin, f"UPDATE documents SET on_hold = true WHERE id = {at}"):
        result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 2)
    assert left() == sorted([2, 5, 6, at])


def test_column_holds_rows_while_the_table_of_the_other_holds_is_empty(documents: None, clock: ManualClock) -> None:
    either = changed(DOCUMENTS, hold=lambda row: (LegalHold.user_id == row.user_id) | row.on_hold)
    LegalHold.delete().execute()
    LegalHold.create(user_id=3)
    run_sweep(either, clock=clock)
    with_a_hold = left()
    LegalHold.delete().execute()

    run_sweep(either, clock=clock)

    assert (with_a_hold, left()) == ([2, 3, 5, 6], [2, 5, 6])


@pytest.mark.parametrize("form", FORMS)
def test_row_given_to_a_user_on_hold_after_the_snapshot_stays(
    documents: None, admin: Connection, clock: ManualClock, form: str
) -> None:
    sweep = pausing(changed(DOCUMENTS, hold=lambda row: FORMS[form](row)), Document.id, 3)

    with changed_in_the_gap(admin, "UPDATE documents SET user_id = 2, on_hold = true WHERE id = 3"):
        result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["deleted_rows"], result.counts.get("failed", 0)) == ("done", 2, 0)
    assert left() == [2, 3, 5, 6]


def test_function_is_not_called_for_rows_on_hold(documents: None, clock: ManualClock) -> None:
    called: list[int] = []

    def call(document: Document) -> None:
        called.append(document.id)
        if document.id == 1:
            LegalHold.create(user_id=1)

    result = run_sweep(changed(DOCUMENTS, action=Call(call, then=Delete())), clock=clock)

    assert called == [1, 3, 4]
    # The hold was set before the first batch was written.
    assert (result.outcome, left()) == ("done", [1, 2, 5, 6])


def test_hold_of_a_table_stage_is_honored(documents: None, clock: ManualClock) -> None:
    staged = Sweep(
        "shop.staged",
        lambda sweep: [
            TableStage(
                name="rows",
                stale=lambda now: Document.expires_at <= now,
                order=(Document.expires_at, Document.id),
                action=Delete(),
                hold=held_users,
            )
        ],
        guard=Guard(first_run=False),
    )

    planned = plan(staged, clock=clock)
    run_sweep(staged, clock=clock)

    assert (planned.held, left()) == (Backlog(2), [2, 5, 6])


def test_removed_hold_changes_the_fingerprint_of_the_predicate(documents: None) -> None:
    without = changed(DOCUMENTS, hold=None)

    assert fingerprint(DOCUMENTS, DOCUMENTS.stages_for_run()) != fingerprint(without, without.stages_for_run())


@NEEDS_SESSION
def test_second_run_with_a_hold_changes_nothing(documents: None) -> None:
    assert_idempotent(DOCUMENTS, now=NOW)

    assert left() == [2, 5, 6]
