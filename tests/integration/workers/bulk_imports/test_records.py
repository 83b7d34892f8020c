"""Events of single records as methods, for applications (docs/workers/bulk_imports.md)."""

from __future__ import annotations

from typing import Any

import pytest
from peewee import IntegrityError

from housekeeping.workers.bulk_imports.models import BulkImport, BulkImportEntity, BulkImportTracker, StatefulModel
from tests.integration.workers.bulk_imports.conftest import STALE, Tables
from tests.internals.core import IllegalEvent
from tests.internals.database import database_now
from tests.internals.workers import ImportStatus, TrackerStatus

#: Event -> (states it may come from, state it leads to), by the numbers in document 65.
IMPORTS: dict[str, tuple[tuple[int, ...], int]] = {
    "start": ((0,), 1),
    "finish": ((1,), 2),
    "cleanup_stale": ((0, 1), 3),
    "fail": ((0, 1, 2, 3, -1, -2), -1),
    "cancel": ((0, 1, 2, 3, -1, -2), -2),
}
TRACKERS: dict[str, tuple[tuple[int, ...], int]] = {
    "enqueue": ((0,), 3),
    "start": ((0, 3), 1),
    "retry": ((1,), 3),
    "finish": ((1,), 2),
    "cleanup_stale": ((0, 1, 3), 4),
    "fail": ((0, 1, 2, 3, 4, -1, -2, -3), -1),
    "skip": ((0, 1, 2, 3, 4, -1, -2, -3), -2),
    "cancel": ((0, 1, 2, 3, 4, -1, -2, -3), -3),
}
CASES = [
    *((model, event) for model in (BulkImport, BulkImportEntity) for event in IMPORTS),
    *((BulkImportTracker, event) for event in TRACKERS),
]


def _add_imports(tables: Tables, states: list[int]) -> None:
    tables.add_imports(len(states), STALE, f"(ARRAY{states})[n]")


def _add_entities(tables: Tables, states: list[int]) -> None:
    tables.add_entities(len(states), STALE, f"(ARRAY{states})[n]")


def _add_trackers(tables: Tables, states: list[int]) -> None:
    tables.add_entities(1)
    tables.add_trackers(1, ", ".join(map(str, states)), STALE)


#: Add a record of the table in each of these states.
add = {BulkImport: _add_imports, BulkImportEntity: _add_entities, BulkImportTracker: _add_trackers}


def fired(record: Any, event: str) -> str | None:
    """Return the error that rejected the event, or None."""
    try:
        getattr(record, event)()
    except IllegalEvent as error:
        return str(error)
    return None


@pytest.mark.parametrize(("model", "event"), CASES)
def test_events_are_allowed_only_from_their_sources(tables: Tables, model: type[Any], event: str) -> None:
    sources, target = (TRACKERS if model is BulkImportTracker else IMPORTS)[event]
    states = list(TrackerStatus if model is BulkImportTracker else ImportStatus)
    numbers = [state.value for state in states]
    add[model](tables, numbers)
    table = model._meta.table_name
    records = list(model.select().where(model.id <= len(states)).order_by(model.id))

    before = database_now()

    refusals = [fired(record, event) for record in records]

    after = [(target, True) if number in sources else (number, False) for number in numbers]
    found = tables.do(f"SELECT status, updated_at >= '{before}' FROM {table} WHERE id <= {len(states)} ORDER BY id")
    assert found == after
    assert [(record.status, record.updated_at >= before) for record in records] == after
    allowed = ", ".join(states[numbers.index(number)].name.lower() for number in sources)
    assert refusals == [
        None
        if state.value in sources
        else f"{model.__name__} {id} is {state.name.lower()}: {event} is allowed from {allowed} only"
        for id, state in enumerate(states, start=1)
    ]


def test_the_machines_have_these_events_and_no_others() -> None:
    assert sorted(BulkImport.machine.events) == sorted(BulkImportEntity.machine.events) == sorted(IMPORTS)
    assert sorted(BulkImportTracker.machine.events) == sorted(TRACKERS)


@pytest.mark.parametrize("state", [0, 1])
def test_entity_changes_all_its_open_trackers(tables: Tables, statements: list[str], state: int) -> None:
    tables.add_entities(2, status=state)
    tables.add_trackers(1, "0, 1, 3, 2, 4, -1, -2, -3")
    tables.add_trackers(2, "0")

    before = database_now()

    BulkImportEntity.get_by_id(1).cleanup_stale()

    assert (tables.entities(), tables.trackers(1), tables.trackers(2)) == (
        {1: 3, 2: state},
        [4, 4, 4, 2, 4, -1, -2, -3],
        [0],
    )
    changed = f"SELECT array_agg(status ORDER BY id) FROM bulk_import_trackers WHERE updated_at >= '{before}'"
    assert tables.do(changed) == [([4, 4, 4],)]


def test_entity_stays_if_a_tracker_cannot_change(tables: Tables) -> None:
    tables.add_entities(1)
    tables.add_trackers(1, "0, 1")
    tables.do("ALTER TABLE bulk_import_trackers ADD CHECK (NOT (status = 4 AND relation = 'relation 2'))")
    entity = BulkImportEntity.get_by_id(1)
    before = dict(entity.__data__)

    with pytest.raises(IntegrityError):
        entity.cleanup_stale()

    assert (tables.entities(), tables.trackers()) == ({1: 1}, [0, 1])
    assert entity.__data__ == before, "nor does the object"


def test_records_read_and_write_states_by_name(tables: Tables) -> None:
    one = BulkImport.create(user_id=1)
    entity = BulkImportEntity.create(bulk_import=one, namespace_id=1, source_type=0, source_full_path="a")
    BulkImportTracker.create(bulk_import_entity=entity, relation="members")

    one.start()

    assert tables.do("SELECT status, has_failures FROM bulk_imports") == [(1, False)]
    assert BulkImport.get().status is ImportStatus.STARTED
    assert [tracker.status for tracker in entity.trackers] == [TrackerStatus.CREATED]
    tables.do("UPDATE bulk_imports SET status = 9")
    assert BulkImport.get().status == 9, "a number of a newer release is read as it is"


def test_entity_has_exactly_one_owner(tables: Tables) -> None:
    one = BulkImport.create(user_id=1)

    with pytest.raises(IntegrityError, match="num_nonnulls|check"):
        BulkImportEntity.create(bulk_import=one, namespace_id=1, project_id=1, source_type=0, source_full_path="a")


@pytest.mark.parametrize("model", [BulkImport, BulkImportEntity, BulkImportTracker])
def test_the_status_has_no_default_in_the_database(tables: Tables, model: type[StatefulModel]) -> None:
    (column,) = tables.do(
        "SELECT data_type, is_nullable, column_default FROM information_schema.columns "
        f"WHERE table_schema = current_schema AND table_name = '{model._meta.table_name}' AND column_name = 'status'"
    )

    assert column == ("smallint", "NO", None)
