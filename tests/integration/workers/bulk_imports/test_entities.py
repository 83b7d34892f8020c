"""Document 65, トランザクション仕様: an entity and its trackers change together or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.conftest import Locked
from tests.integration.workers.bulk_imports.conftest import EACH, STALE, Tables, heard
from tests.internals.core import entity_timed_out
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.workers import imports_sweep as sweep
from tests.session_settings import set_in_session

SMALL = changed(sweep, batch=10)
#: The state of an entity, and those of its trackers.
Whole = tuple[int, list[int]]


@pytest.fixture
def whole(tables: Tables) -> Callable[[int], Whole]:
    return lambda entity: (tables.entities()[entity], tables.trackers(entity))


def test_entity_with_a_locked_tracker_is_skipped(
    tables: Tables, locked: Locked, clock: ManualClock, whole: Callable[[int], Whole]
) -> None:
    # Had it waited, lock_timeout would have failed the run.
    tables.add_entities(3)
    tables.add_trackers(EACH, "0, 1, 3")

    with locked("SELECT * FROM bulk_import_trackers WHERE bulk_import_entity_id = 2 AND status = 1 FOR UPDATE"):
        first = run_sweep(sweep, clock=clock)
        left_out = whole(2)
    second = run_sweep(sweep, clock=clock)

    assert (first.outcome, first.counts["failed"]) == ("done", 0)
    assert (first.counts["timed_out_entities"], first.counts["timed_out_trackers"]) == (2, 6)
    assert left_out == (1, [0, 1, 3])
    assert (second.counts["timed_out_entities"], second.counts["timed_out_trackers"]) == (1, 3)
    assert [whole(id) for id in (1, 2, 3)] == [(3, [4, 4, 4])] * 3


def test_locked_ended_tracker_does_not_block_its_entity(
    tables: Tables, locked: Locked, clock: ManualClock, whole: Callable[[int], Whole]
) -> None:
    tables.add_entities(1)
    tables.add_trackers(1, "0, 2")

    with locked("SELECT * FROM bulk_import_trackers WHERE status = 2 FOR UPDATE"):
        run_sweep(sweep, clock=clock)

    assert whole(1) == (3, [4, 2])


@pytest.mark.parametrize(
    ("table", "condition"), [("bulk_import_trackers", "OLD.relation = 'relation 2'"), ("bulk_import_entities", "true")]
)
def test_entity_changes_with_all_trackers_or_not_at_all(
    tables: Tables, clock: ManualClock, whole: Callable[[int], Whole], table: str, condition: str
) -> None:
    # ロールバック条件: the entity's or a tracker's update fails.
    tables.add_entities(1)
    tables.add_trackers(1, "0, 1, 3")
    tables.refuse(table, condition)

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["failed"], result.counts["timed_out_trackers"]) == ("done", 1, 0)
    assert whole(1) == (1, [0, 1, 3])


def test_tracker_kept_by_a_trigger_keeps_its_entity(
    tables: Tables, clock: ManualClock, whole: Callable[[int], Whole]
) -> None:
    tables.add_entities(2)
    tables.add_trackers(EACH, "0, 1")
    tables.refuse("bulk_import_trackers", "OLD.bulk_import_entity_id = 1 AND OLD.status = 1", doing="RETURN NULL")

    result = run_sweep(sweep, clock=clock)

    assert (whole(1), whole(2)) == ((1, [0, 1]), (3, [4, 4]))
    assert (result.counts["timed_out_entities"], result.counts["failed"]) == (1, 1)


@pytest.mark.parametrize(
    ("table", "condition"),
    [
        ("bulk_import_trackers", "OLD.bulk_import_entity_id = 1 AND OLD.status = 1"),
        ("bulk_import_entities", "OLD.id = 1"),
    ],
)
def test_tracker_or_entity_with_an_undone_change_keeps_both(
    tables: Tables, clock: ManualClock, whole: Callable[[int], Whole], table: str, condition: str
) -> None:
    tables.add_entities(2)
    tables.add_trackers(EACH, "0, 1")
    tables.refuse(table, condition, doing="NEW.status := OLD.status")

    result = run_sweep(sweep, clock=clock)

    assert (whole(1), whole(2)) == ((1, [0, 1]), (3, [4, 4]))
    assert (result.counts["timed_out_entities"], result.counts["failed"]) == (1, 1)


def test_entity_with_10_000_trackers_changes_all_of_them(tables: Tables, clock: ManualClock) -> None:
    tables.add_entities(2)
    tables.do(
        "INSERT INTO bulk_import_trackers (bulk_import_entity_id, relation, stage, status, has_next_page) "
        "SELECT 1, n, 0, 1, false FROM generate_series(1, 10000) AS n"
    )

    result = run_sweep(sweep, clock=clock)

    assert (result.counts["timed_out_entities"], result.counts["timed_out_trackers"]) == (2, 10_000)
    assert tables.do("SELECT DISTINCT status FROM bulk_import_trackers") == [(4,)]


def test_tracker_being_added_keeps_its_entity(
    tables: Tables, locked: Locked, clock: ManualClock, whole: Callable[[int], Whole]
) -> None:
    # Not committed yet, so it cannot be changed with the others; the foreign key holds the entity meanwhile.
    tables.add_entities(1)
    tables.add_trackers(1, "1")

    with locked(
        "INSERT INTO bulk_import_trackers (bulk_import_entity_id, relation, stage, status, has_next_page) "
        "VALUES (1, 'new', 0, 0, false)"
    ):
        result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["timed_out_entities"]) == ("done", 0)
    assert whole(1) == (1, [1])


def test_events_contain_only_changed_entities(
    tables: Tables, locked: Locked, clock: ManualClock, lines: Callable[[str], list[dict[str, Any]]]
) -> None:
    tables.add_entities(3)
    tables.add_trackers(EACH, "1")
    tables.refuse("bulk_import_trackers", "OLD.bulk_import_entity_id = 3")

    with (
        locked("SELECT * FROM bulk_import_trackers WHERE bulk_import_entity_id = 2 FOR UPDATE"),
        heard(entity_timed_out) as entities,
    ):
        run_sweep(sweep, clock=clock)

    assert entities == [[{"bulk_import_entity_id": 1, "bulk_import_id": 1_000_000}]]
    assert [line["bulk_import_entity_id"] for line in lines("BulkImports::Entity stale")] == [1]


def test_unknown_type_is_logged_as_its_number(
    tables: Tables, clock: ManualClock, lines: Callable[[str], list[dict[str, Any]]]
) -> None:
    tables.add_entities(1)
    tables.do("UPDATE bulk_import_entities SET source_type = 7")

    run_sweep(sweep, clock=clock)

    (line,) = lines("BulkImports::Entity stale")
    assert line["bulk_import_entity_type"] == "7"


def test_the_batch_never_exceeds_its_size_under_a_nested_loop(
    postgres: Database, tables: Tables, clock: ManualClock
) -> None:
    tables.add_imports(35)
    tables.add_entities(35)
    tables.add_trackers(EACH, "1, 3")
    set_in_session(postgres, "enable_hashjoin = off", "enable_mergejoin = off", "enable_hashagg = off")
    set_in_session(postgres, "enable_material = off", "enable_sort = off")
    # PostgreSQL 13 has none of it.
    postgres.execute_sql("SELECT set_config(name, 'off', false) FROM pg_settings WHERE name = 'enable_memoize'")
    small = dataclasses.replace(SMALL, options={**SMALL.options, "page_size": 10})
    sizes: list[tuple[int, int, int]] = []

    def note(counts: dict[str, Any]) -> None:
        sizes.append((counts["timed_out_imports"], counts["timed_out_entities"], counts["timed_out_trackers"]))

    run_sweep(small, clock=clock, on_batch=note)

    assert sizes == [
        *((10, 0, 0), (20, 0, 0), (30, 0, 0), (35, 0, 0)),
        *((35, 10, 20), (35, 20, 40), (35, 30, 60), (35, 35, 70)),
    ]


def test_tracker_without_times_is_changed(tables: Tables, clock: ManualClock) -> None:
    tables.add_entities(1, STALE)
    tables.add_trackers(1, "1", "NULL")

    run_sweep(sweep, clock=clock)

    assert tables.do("SELECT status, updated_at IS NOT NULL FROM bulk_import_trackers") == [(4, True)]
