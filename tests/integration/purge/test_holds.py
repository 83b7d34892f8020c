"""A purge leaves the rows that a declared sweep of the same table holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from peewee import SQL
from psycopg2.extensions import connection as Connection

from housekeeping import Sweep
from housekeeping.core.errors import DeclarationError
from housekeeping.database.connection import Database
from housekeeping.purge.plan import plan_purge
from housekeeping.purge.request import PurgeRequest
from housekeeping.purge.sweep import sweep_of
from housekeeping.sweeps.stages.stage import Backlog
from tests.integration.pausing import changed_in_the_gap, pausing
from tests.integration.purge.conftest import purge
from tests.integration.sweeps.documents import DOCUMENTS, Document, LegalHold, left
from tests.integration.sweeps.documents import documents as documents
from tests.integration.sweeps.partitions import events
from tests.integration.sweeps.partitions.events import Event

ALL = PurgeRequest(table="documents", where="true", batch_size=2)
BY_COLUMN = dataclasses.replace(DOCUMENTS, name="shop.by_column", hold=lambda: Document.on_hold)
PARTITIONS = events.sweep(hold=lambda: Event.id <= 3)
WITHOUT = dataclasses.replace(DOCUMENTS, name="shop.without", hold=None)


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        ([DOCUMENTS], ("shop.documents",)),
        ([BY_COLUMN, WITHOUT], ("shop.by_column",)),
        ([DOCUMENTS, BY_COLUMN], ("shop.documents", "shop.by_column")),
        ([dataclasses.replace(DOCUMENTS, enabled=False)], ("shop.documents",)),
    ],
)
def test_rows_that_a_declared_sweep_holds_stay(
    documents: None, declared: Sequence[Sweep], names: tuple[str, ...]
) -> None:
    planned = plan_purge(ALL, sweep_of(ALL, declared))

    result = purge(ALL, declared)

    assert (planned.plan.stale, planned.plan.held, planned.held_by) == (Backlog(4), Backlog(2), names)
    assert (result.outcome, result.counts["deleted_rows"], left()) == ("done", 4, [2, 5])


def test_every_hold_of_the_table_counts(documents: None) -> None:
    LegalHold.delete().where(LegalHold.user_id == 5).execute()
    Document.update(on_hold=None).where(Document.id == 2).execute()

    purge(ALL, [DOCUMENTS, BY_COLUMN])

    assert left() == [2, 5]


def test_ignored_holds_delete_the_rows_and_are_recorded(documents: None) -> None:
    request = dataclasses.replace(ALL, ignore_holds=True)

    planned, result = plan_purge(request, sweep_of(request, [DOCUMENTS])), purge(request, [DOCUMENTS])

    assert (planned.plan.held, planned.held_by, left()) == (None, (), [])
    assert result.counts["purge"]["ignore_holds"] is True


def test_hold_in_another_database_or_on_another_table_does_not_count(documents: None) -> None:
    elsewhere = dataclasses.replace(DOCUMENTS, database="ci")

    assert sweep_of(ALL, [elsewhere, PARTITIONS]).hold is None


def test_next_batch_of_a_purge_honors_a_new_hold(documents: None) -> None:
    def set_hold(counts: dict[str, Any]) -> None:
        if counts["batches"] == 1:
            LegalHold.create(user_id=4)

    purge(ALL, [DOCUMENTS], on_batch=set_hold)

    assert left() == [2, 4, 5]


def test_row_put_on_hold_after_the_snapshot_of_a_purge_stays(documents: None, admin: Connection) -> None:
    sweep = pausing(sweep_of(ALL, [BY_COLUMN]), SQL("id"), 3)

    with changed_in_the_gap(admin, "UPDATE documents SET on_hold = true WHERE id = 3"):
        purge(ALL, sweep=sweep)

    assert left() == [2, 3, 5]


def test_hold_of_partitions_keeps_rows_of_the_table_and_of_a_partition(postgres: Database) -> None:
    events.create()

    one = purge(PurgeRequest(table="events_09", where="true"), [PARTITIONS])
    all_of_them = purge(PurgeRequest(table="events", where="true"), [PARTITIONS])

    assert (one.counts["deleted_rows"], all_of_them.counts["deleted_rows"]) == (7, 21)
    assert postgres.execute_sql("SELECT count(*) FROM events WHERE id <= 3").fetchone() == (12,)


def test_hold_that_fails_stops_the_purge(documents: None) -> None:
    broken = dataclasses.replace(DOCUMENTS, hold=lambda: Document.on_hodl)  # type: ignore[attr-defined]

    with pytest.raises(DeclarationError, match="on_hodl"):
        plan_purge(ALL, sweep_of(ALL, [broken]))
    assert len(left()) == 6
