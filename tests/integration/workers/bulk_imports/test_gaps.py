"""Document 65, 排他制御: a row that changes between read and write is never overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.bulk_imports.models import BulkImportEntity
from tests.faults import at_number, at_step
from tests.integration.pausing import changed_in_the_gap, pausing
from tests.integration.workers.bulk_imports.conftest import EACH, FRESH, Tables
from tests.internals.engine import RunResult, run_sweep
from tests.internals.sweeps import TableStage
from tests.internals.workers import imports_sweep as sweep

#: Runs the sweep, with a change between the read and the write of the row 1 of a model's table.
InTheGap = Callable[[type[Any], str], RunResult]

NEW_TRACKER = (
    "INSERT INTO bulk_import_trackers (bulk_import_entity_id, relation, stage, status, has_next_page) "
    "VALUES (1, 'new', 0, 0, false)"
)


@pytest.fixture
def in_the_gap(tables: Tables, clock: ManualClock) -> InTheGap:
    def run(model: type[Any], change: str) -> RunResult:
        with changed_in_the_gap(tables.admin, change):
            return run_sweep(pausing(sweep, model.id, 1), clock=clock)

    return run


@pytest.fixture
def at_the_trackers(tables: Tables, clock: ManualClock) -> Callable[[str], RunResult]:
    """Run the sweep, with a change where the statement that changes entities and trackers reads the trackers."""

    def run(change: str) -> RunResult:
        with changed_in_the_gap(tables.admin, change):
            tables.do("ALTER TABLE bulk_import_trackers RENAME TO trackers")
            tables.do("CREATE VIEW bulk_import_trackers AS SELECT * FROM trackers WHERE pause_at(1, 1)")
            return run_sweep(sweep, clock=clock)

    return run


@pytest.mark.parametrize("move", ["status = 2", "status = 3", "status = -1", "status = -2", f"updated_at = {FRESH}"])
def test_entity_changed_between_read_and_write_is_skipped(tables: Tables, in_the_gap: InTheGap, move: str) -> None:
    tables.add_entities(2)
    tables.add_trackers(EACH, "0, 1, 3")

    result = in_the_gap(BulkImportEntity, f"UPDATE bulk_import_entities SET {move} WHERE id = 1")

    assert (result.counts["timed_out_entities"], result.counts["timed_out_trackers"]) == (1, 3)
    assert tables.do(f"SELECT id FROM bulk_import_entities WHERE id = 1 AND {move}") == [(1,)]
    assert tables.trackers(1) == [0, 1, 3]


def test_tracker_added_before_the_lock_changes_with_its_entity(tables: Tables, in_the_gap: InTheGap) -> None:
    # One statement for entity and trackers would not see it: its snapshot is older than its locks.
    tables.add_entities(1)
    tables.add_trackers(1, "1")

    result = in_the_gap(BulkImportEntity, NEW_TRACKER)

    assert (result.counts["timed_out_entities"], result.counts["timed_out_trackers"]) == (1, 2)
    assert tables.trackers() == [4, 4]


@pytest.mark.parametrize("status", [2, -1, -2, -3])
def test_entity_whose_tracker_ends_meanwhile_is_skipped(
    tables: Tables, at_the_trackers: Callable[[str], RunResult], status: int
) -> None:
    # It makes progress after all; the next run checks it again.
    tables.add_entities(2)
    tables.add_trackers(EACH, "0, 1")

    result = at_the_trackers(f"UPDATE trackers SET status = {status} WHERE bulk_import_entity_id = 1 AND status = 1")

    assert (result.counts["timed_out_entities"], result.counts["failed"]) == (1, 0)
    assert (tables.entities(), tables.trackers(1), tables.trackers(2)) == ({1: 1, 2: 3}, [0, status], [4, 4])


def test_tracker_in_another_open_state_meanwhile_is_changed(
    tables: Tables, at_the_trackers: Callable[[str], RunResult]
) -> None:
    tables.add_entities(1)
    tables.add_trackers(1, "0, 1")

    result = at_the_trackers("UPDATE trackers SET status = 3 WHERE status = 1")

    assert (result.counts["timed_out_entities"], result.counts["timed_out_trackers"]) == (1, 2)
    assert tables.trackers() == [4, 4]


def test_row_that_ends_during_bisection_is_skipped(tables: Tables, clock: ManualClock) -> None:
    tables.add_imports(4)
    tables.refuse("bulk_imports", "NEW.status = 3 AND OLD.id = 1")

    def finish_one() -> None:
        tables.do("UPDATE bulk_imports SET status = 2 WHERE id = 2 AND status = 1")

    # First the whole batch is applied, then its parts.
    with at_step(TableStage, "apply", "before", at_number(2, finish_one)):
        result = run_sweep(sweep, clock=clock)

    assert tables.imports() == {1: 1, 2: 2, 3: 3, 4: 3}
    assert (result.counts["timed_out_imports"], result.counts["failed"]) == (2, 1)
