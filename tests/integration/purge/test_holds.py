"""A purge leaves the rows that a declared sweep of the same table holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from housekeeping import Sweep
from tests.declarations import changed, stage_of
from tests.integration.purge.conftest import purge
from tests.integration.sweeps.documents import DOCUMENTS, Document, left
from tests.integration.sweeps.documents import documents as documents
from tests.integration.sweeps.partitions import events
from tests.internals.core import DeclarationError, Refused
from tests.internals.database import Database
from tests.internals.engine import PurgeRequest, sweep_of
from tests.internals.insight import plan_purge
from tests.internals.sweeps import Backlog

ALL = PurgeRequest(table="documents", where="true", batch_size=2)
BY_COLUMN = changed(DOCUMENTS, name="shop.by_column", hold=lambda row: row.on_hold)
PARTITIONS = events.sweep(hold=lambda row: row.id <= 3)
WITHOUT = changed(DOCUMENTS, name="shop.without", hold=None)


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        ([DOCUMENTS], ("shop.documents",)),
        ([BY_COLUMN, WITHOUT], ("shop.by_column",)),
        ([DOCUMENTS, BY_COLUMN], ("shop.documents", "shop.by_column")),
        ([changed(DOCUMENTS, enabled=False)], ("shop.documents",)),
    ],
)
def test_rows_that_a_declared_sweep_holds_stay(
    documents: None, declared: Sequence[Sweep], names: tuple[str, ...]
) -> None:
    planned = plan_purge(ALL, sweep_of(ALL, declared))

    result = purge(ALL, declared)

    assert (planned.plan.stale, planned.plan.held, planned.held_by) == (Backlog(4), Backlog(2), names)
    assert (result.outcome, result.counts["deleted_rows"], left()) == ("done", 4, [2, 5])


def test_ignored_holds_delete_the_rows_and_are_recorded(documents: None) -> None:
    request = dataclasses.replace(ALL, ignore_holds=True)

    planned, result = plan_purge(request, sweep_of(request, [DOCUMENTS])), purge(request, [DOCUMENTS])

    assert (planned.plan.held, planned.held_by, left()) == (None, (), [])
    assert result.counts["purge"]["ignore_holds"] is True


def test_hold_in_another_database_or_on_another_table_does_not_count(documents: None) -> None:
    elsewhere = dataclasses.replace(DOCUMENTS, database="ci")

    assert stage_of(sweep_of(ALL, [elsewhere, PARTITIONS])).hold is None


def test_hold_of_partitions_keeps_rows_of_the_table_and_of_a_partition(postgres: Database) -> None:
    events.create()

    one = purge(PurgeRequest(table="events_09", where="true"), [PARTITIONS])
    all_of_them = purge(PurgeRequest(table="events", where="true"), [PARTITIONS])

    assert (one.counts["deleted_rows"], all_of_them.counts["deleted_rows"]) == (7, 21)
    assert postgres.execute_sql("SELECT count(*) FROM events WHERE id <= 3").fetchone() == (12,)


def test_hold_that_fails_stops_the_purge(documents: None) -> None:
    broken = changed(DOCUMENTS, hold=lambda row: Document.on_hodl)  # type: ignore[attr-defined]

    with pytest.raises(DeclarationError, match="on_hodl"):
        plan_purge(ALL, sweep_of(ALL, [broken]))
    assert len(left()) == 6


PARENTS = PurgeRequest(table="folders", where="true")


@pytest.fixture
def folders(documents: None, postgres: Database) -> None:
    """Each document is in a folder of its own, with which it is deleted; two of them are on hold."""
    postgres.execute_sql(
        "CREATE TABLE folders (id bigint PRIMARY KEY); INSERT INTO folders SELECT id FROM documents;"
        "ALTER TABLE documents ADD COLUMN folder_id bigint REFERENCES folders (id) ON DELETE CASCADE;"
        "UPDATE documents SET folder_id = id; CREATE INDEX ON documents (folder_id)"
    )


def test_purge_whose_cascade_would_delete_held_rows_is_refused(folders: None) -> None:
    with pytest.raises(Refused) as refused:
        plan_purge(PARENTS, sweep_of(PARENTS, [DOCUMENTS]))

    assert str(refused.value) == (
        "documents (folder_id) references folders, ON DELETE CASCADE, indexed: its rows are deleted as well, and not "
        "counted; 2 of the first 6 matching rows lead to rows that shop.documents holds. Leave the rows above them out "
        "of --where, or add --ignore-holds"
    )


def test_purge_whose_cascade_reaches_no_held_row_is_planned(folders: None) -> None:
    request = dataclasses.replace(PARENTS, where="id NOT IN (2, 5)")

    assert plan_purge(request, sweep_of(request, [DOCUMENTS])).rows == Backlog(4)


def test_purge_that_ignores_holds_deletes_held_rows_by_a_cascade(folders: None) -> None:
    request = dataclasses.replace(PARENTS, ignore_holds=True)

    planned = plan_purge(request, sweep_of(request, [DOCUMENTS]))
    purge(request, [DOCUMENTS])

    assert ([each.level for each in planned.plan.dependents], left()) == (["warning"], [])
    assert "out of --where" in str(planned.plan.dependents[0].way_out)
