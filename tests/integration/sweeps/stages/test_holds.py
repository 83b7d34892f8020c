"""Holds: stale rows that stay, in runs, plans, backlogs and every recheck."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC
from typing import Any, Final

import pytest
from peewee import SQL, fn
from psycopg2.extensions import connection as Connection

from housekeeping import Call, Delete, Sweep
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.insight.plan import dry_run, plan
from housekeeping.sweeps.insight.status import worker_status
from housekeeping.sweeps.ledger.runs import Counts
from housekeeping.sweeps.limits.fingerprint import fingerprint
from housekeeping.sweeps.stages.stage import Backlog
from housekeeping.sweeps.stages.table_stage import TableStage
from housekeeping.testing import ManualClock, assert_idempotent, assert_survives_kill
from tests.integration.pausing import changed_in_the_gap, pausing
from tests.integration.sweeps.documents import DOCUMENTS, NOW, Document, LegalHold, held_users, left
from tests.integration.sweeps.documents import documents as documents
from tests.session_settings import NEEDS_SESSION

#: The ways to write a hold of the users 2 and 5.
FORMS: Final[dict[str, Callable[[], Any]]] = {
    "condition on another table": lambda: LegalHold.user_id == Document.user_id,
    "query": held_users,
    "exists": lambda: fn.EXISTS(held_users()),
    "in": lambda: Document.user_id.in_(LegalHold.select(LegalHold.user_id)),
    "column": lambda: Document.on_hold,
    "comparison": lambda: Document.on_hold == True,  # noqa: E712
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_on_hold_stay_and_rows_where_it_is_null_go(documents: None, clock: ManualClock, form: str) -> None:
    sweep = dataclasses.replace(DOCUMENTS, hold=FORMS[form])

    planned, dry = plan(sweep, clock=clock), dry_run(sweep, clock=clock)
    result = run_sweep(sweep, clock=clock)

    assert (planned.stale, planned.held, planned.batches) == (Backlog(3), Backlog(2), 2)
    assert planned.as_json()["held"] == planned.as_json()["passes"][0]["held"] == 2
    assert [row["id"] for row in planned.stages[0][0].samples] == [1, 3, 4]
    assert dry.counts["deleted_rows"] == result.counts["deleted_rows"] == 3
    assert (result.outcome, left()) == ("done", [2, 5, 6])


def test_status_shows_held_rows_beside_the_backlog(documents: None, clock: ManualClock) -> None:
    before = worker_status(DOCUMENTS, clock.now(), UTC)
    run_sweep(DOCUMENTS, clock=clock)
    after = worker_status(DOCUMENTS, clock.now(), UTC)
    without = worker_status(dataclasses.replace(DOCUMENTS, hold=None), clock.now(), UTC)

    assert (before.waiting, before.held, after.waiting, after.held) == (Backlog(3), Backlog(2), Backlog(0), Backlog(2))
    assert (after.as_json()["held"], after.as_json()["held_exact"], after.oldest) == (2, True, None)
    assert (without.held, without.as_json()["held"]) == (None, None)


def test_count_of_held_rows_stops_at_its_limit(documents: None, clock: ManualClock) -> None:
    (stage,) = DOCUMENTS.stages_for_run()
    assert isinstance(stage, TableStage)

    counted = [stage.held(clock.now(), limit) for limit in (4, 5, 6)]

    assert counted[1:] == [Backlog(2), Backlog(2)]
    assert counted[0] is not None and not counted[0].exact


def test_next_batch_honors_a_hold_that_is_set_during_the_run(documents: None, clock: ManualClock) -> None:
    def set_hold(counts: Counts) -> None:
        if counts["batches"] == 1:
            LegalHold.create(user_id=4)

    result = run_sweep(DOCUMENTS, clock=clock, on_batch=set_hold)

    assert (result.outcome, result.counts["deleted_rows"], left()) == ("done", 2, [2, 4, 5, 6])


def test_next_batch_of_a_prepared_statement_honors_a_new_hold(documents: None, clock: ManualClock) -> None:
    one_by_one = dataclasses.replace(DOCUMENTS, batch_size=1)

    def set_hold(counts: Counts) -> None:
        if counts["batches"] == 2:
            LegalHold.create(user_id=4)

    run_sweep(one_by_one, clock=clock, on_batch=set_hold)

    assert left() == [2, 4, 5, 6]


def test_next_run_deletes_what_is_released_and_older_rows_come_again(documents: None, clock: ManualClock) -> None:
    run_sweep(DOCUMENTS, clock=clock)
    LegalHold.delete().execute()

    result = run_sweep(DOCUMENTS, clock=clock)

    assert (result.outcome, result.counts["deleted_rows"], left()) == ("done", 2, [6])


@pytest.mark.parametrize("at", [1, 4], ids=["first batch", "second batch"])
def test_row_put_on_hold_after_the_snapshot_is_judged_again(
    documents: None, admin: Connection, clock: ManualClock, at: int
) -> None:
    sweep = pausing(dataclasses.replace(DOCUMENTS, hold=lambda: Document.on_hold), Document.id, at)

    with changed_in_the_gap(admin, f"UPDATE documents SET on_hold = true WHERE id = {at}"):
        result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 2)
    assert left() == sorted([2, 5, 6, at])


def test_column_holds_rows_while_the_table_of_the_other_holds_is_empty(documents: None, clock: ManualClock) -> None:
    either = dataclasses.replace(DOCUMENTS, hold=lambda: (LegalHold.user_id == Document.user_id) | Document.on_hold)
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
    sweep = pausing(dataclasses.replace(DOCUMENTS, hold=FORMS[form]), Document.id, 3)

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

    result = run_sweep(dataclasses.replace(DOCUMENTS, action=Call(call, then=Delete()), counts=()), clock=clock)

    assert called == [1, 3, 4]
    # The hold was set before the first batch was written.
    assert (result.outcome, left()) == ("done", [1, 2, 5, 6])


def test_hold_of_a_table_stage_is_honored(documents: None, clock: ManualClock) -> None:
    staged = Sweep(
        name="shop.staged",
        stages=lambda sweep: [
            TableStage(
                name="rows",
                stale=lambda now: Document.expires_at <= now,
                order=(Document.expires_at, Document.id),
                action=Delete(),
                hold=held_users,
            )
        ],
        counts=("deleted_rows", "batches"),
        confirm_first_run=False,
    )

    planned = plan(staged, clock=clock)
    run_sweep(staged, clock=clock)

    assert (planned.held, left()) == (Backlog(2), [2, 5, 6])


def test_removed_hold_changes_the_fingerprint_of_the_predicate(documents: None) -> None:
    without = dataclasses.replace(DOCUMENTS, hold=None)

    assert fingerprint(DOCUMENTS, DOCUMENTS.stages_for_run()) != fingerprint(without, without.stages_for_run())


def test_hold_of_columns_by_name_is_honored(documents: None, clock: ManualClock) -> None:
    sweep = Sweep.on(
        Document,
        name="shop.named",
        stale=lambda row, now: row.expires_at <= now,
        hold=lambda row: LegalHold.select(SQL("1")).where(LegalHold.user_id == row.user_id),
        action=Delete(),
        confirm_first_run=False,
    )

    run_sweep(sweep, clock=clock)

    assert left() == [2, 5, 6]


@NEEDS_SESSION
def test_second_run_with_a_hold_changes_nothing(documents: None) -> None:
    assert_idempotent(DOCUMENTS, now=NOW)

    assert left() == [2, 5, 6]


@pytest.mark.slow
@NEEDS_SESSION
def test_rows_on_hold_stay_wherever_the_run_is_killed(documents: None) -> None:
    assert_survives_kill(dataclasses.replace(DOCUMENTS, max_rows_per_s=1_000_000, rest=0.001), now=NOW)
