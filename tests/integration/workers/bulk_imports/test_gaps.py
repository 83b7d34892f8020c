"""Document 65, 排他制御: a row that changes between read and write is never overwritten.

The gap is inside a statement: after its snapshot, before it locks the row. A condition that waits for an
advisory lock, added to the very query of the worker, keeps the statement there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from peewee import SQL

from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.bulk_imports.models import BulkImport, BulkImportEntity
from tests.faults import at_number, at_step
from tests.integration.workers.bulk_imports.conftest import EACH, FRESH, Tables
from tests.internals.database import Database
from tests.internals.engine import RunResult, run_sweep
from tests.internals.sweeps import Batch, TableStage
from tests.internals.workers import imports_sweep as sweep

_LOCK = 65
_WAIT = SQL(f"waits_here({_LOCK})")
#: Does something in the gap of a run; the run has ended when it returns.
InTheGap = Callable[[Callable[[], object]], RunResult]


@pytest.fixture
def in_the_gap(postgres: Database, tables: Tables, clock: ManualClock) -> Iterator[InTheGap]:
    # Volatile, so that it is asked for each row; at once again when the lock has been had.
    tables.do(
        "CREATE FUNCTION waits_here(key bigint) RETURNS boolean LANGUAGE plpgsql VOLATILE COST 10000 AS "
        "$$ BEGIN PERFORM pg_advisory_lock(key); PERFORM pg_advisory_unlock(key); RETURN true; END $$"
    )
    tables.do(f"SELECT pg_advisory_lock({_LOCK})")

    def during(action: Callable[[], object]) -> RunResult:
        results: list[RunResult] = []

        def run() -> None:
            with postgres.connection_context():
                results.append(run_sweep(sweep, clock=clock))

        thread = threading.Thread(target=run)
        thread.start()
        with _released(tables, thread):
            _until_it_waits(tables)
            action()
        (result,) = results
        return result

    yield during
    tables.do("SELECT pg_advisory_unlock_all()")


@contextmanager
def _released(tables: Tables, thread: threading.Thread) -> Iterator[None]:
    try:
        yield
    finally:
        tables.do(f"SELECT pg_advisory_unlock({_LOCK})")
        thread.join(timeout=30)


def _until_it_waits(tables: Tables) -> None:
    query = f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = {_LOCK} AND NOT granted"
    for _ in range(2000):
        if tables.do(query) == [(1,)]:
            return
        tables.do("SELECT pg_sleep(0.005)")
    raise AssertionError("the run did not come to the gap")


def wait_in(monkeypatch: pytest.MonkeyPatch, table: type[TableStage], model: type[Any]) -> None:
    """Make the statement that locks rows of the model wait between read and lock."""
    rows = table.rows

    def waiting(self: TableStage, batch: Batch, **locked: bool) -> Any:
        query = rows(self, batch, **locked)
        return query.where(_WAIT) if self.model is model and not locked.get("is_locked") else query

    monkeypatch.setattr(table, "rows", waiting)


def _wait_for_trackers(tables: Tables) -> None:
    """Make the statement that changes entities and trackers stop where it reads trackers."""
    tables.do("ALTER TABLE bulk_import_trackers RENAME TO trackers")
    tables.do(f"CREATE VIEW bulk_import_trackers AS SELECT * FROM trackers WHERE waits_here({_LOCK})")


MOVES = ["status = 2", "status = 3", "status = -1", "status = -2", f"updated_at = {FRESH}"]


@pytest.mark.parametrize("move", MOVES)
def test_import_changed_between_read_and_write_is_skipped(
    tables: Tables, in_the_gap: InTheGap, monkeypatch: pytest.MonkeyPatch, move: str
) -> None:
    tables.add_imports(3)
    wait_in(monkeypatch, TableStage, BulkImport)

    result = in_the_gap(lambda: tables.do(f"UPDATE bulk_imports SET {move} WHERE id = 1"))

    assert (result.outcome, result.counts["timed_out_imports"]) == ("done", 2)
    assert tables.do(f"SELECT id FROM bulk_imports WHERE id = 1 AND {move}") == [(1,)]


@pytest.mark.parametrize("move", MOVES)
def test_entity_changed_between_read_and_write_is_skipped(
    tables: Tables, in_the_gap: InTheGap, monkeypatch: pytest.MonkeyPatch, move: str
) -> None:
    tables.add_entities(2)
    tables.add_trackers(EACH, "0, 1, 3")
    wait_in(monkeypatch, TableStage, BulkImportEntity)

    result = in_the_gap(lambda: tables.do(f"UPDATE bulk_import_entities SET {move} WHERE id = 1"))

    assert (result.counts["timed_out_entities"], result.counts["timed_out_trackers"]) == (1, 3)
    assert tables.do(f"SELECT id FROM bulk_import_entities WHERE id = 1 AND {move}") == [(1,)]
    assert tables.trackers(1) == [0, 1, 3]


def test_tracker_added_before_the_lock_changes_with_its_entity(
    tables: Tables, in_the_gap: InTheGap, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One statement for entity and trackers would not see it: its snapshot is older than its locks.
    tables.add_entities(1)
    tables.add_trackers(1, "1")
    wait_in(monkeypatch, TableStage, BulkImportEntity)

    result = in_the_gap(
        lambda: tables.do(
            "INSERT INTO bulk_import_trackers (bulk_import_entity_id, relation, stage, status, has_next_page) "
            "VALUES (1, 'new', 0, 0, false)"
        )
    )

    assert (result.counts["timed_out_entities"], result.counts["timed_out_trackers"]) == (1, 2)
    assert tables.trackers() == [4, 4]


@pytest.mark.parametrize("status", [2, -1, -2, -3])
def test_entity_whose_tracker_ends_meanwhile_is_skipped(tables: Tables, in_the_gap: InTheGap, status: int) -> None:
    # It makes progress after all; the next run checks it again.
    tables.add_entities(2)
    tables.add_trackers(EACH, "0, 1")
    _wait_for_trackers(tables)

    result = in_the_gap(
        lambda: tables.do(f"UPDATE trackers SET status = {status} WHERE bulk_import_entity_id = 1 AND status = 1")
    )

    assert (result.counts["timed_out_entities"], result.counts["failed"]) == (1, 0)
    assert (tables.entities(), tables.trackers(1), tables.trackers(2)) == ({1: 1, 2: 3}, [0, status], [4, 4])


def test_tracker_in_another_open_state_meanwhile_is_changed(tables: Tables, in_the_gap: InTheGap) -> None:
    tables.add_entities(1)
    tables.add_trackers(1, "0, 1")
    _wait_for_trackers(tables)

    result = in_the_gap(lambda: tables.do("UPDATE trackers SET status = 3 WHERE status = 1"))

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
