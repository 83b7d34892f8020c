"""Document 65, section by section: each test names its section."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from housekeeping.testing.stubs import ManualClock
from tests.database_times import DatabaseTimes
from tests.declarations import changed
from tests.integration.workers.bulk_imports.conftest import FRESH, LIMIT, STALE, Tables, heard
from tests.internals.core import WorkerSettings, entity_timed_out, import_timed_out
from tests.internals.engine import run_sweep
from tests.internals.workers import IMPORT_MODELS as MODELS
from tests.internals.workers import imports_sweep as sweep

#: Small pages, so that few rows make several batches.
SMALL = changed(sweep, batch=10, options={"page_size": 10, "log_records": True})
NOTHING = {
    "timed_out_imports": 0,
    "timed_out_entities": 0,
    "timed_out_trackers": 0,
    "failed": 0,
    "out_of_time": False,
}
ALL_STATES = (-2, -1, 0, 1, 2, 3)


def test_row_unchanged_for_over_24_hours_is_stale(tables: Tables, clock: ManualClock) -> None:
    # データベース操作仕様: updated_at < 24 hours ago, strictly.
    for id, offset in enumerate(("- interval '1 microsecond'", "", "+ interval '1 microsecond'"), start=1):
        tables.add_imports(1, f"{LIMIT} {offset}", first_id=id)
        tables.add_entities(1, f"{LIMIT} {offset}", first_id=id)

    result = run_sweep(sweep, clock=clock)

    assert result.counts == NOTHING | {"timed_out_imports": 1, "timed_out_entities": 1}
    assert [tables.imports()[id] for id in (1, 2, 3)] == [3, 1, 1]
    assert tables.entities() == {1: 3, 2: 1, 3: 1}


def test_only_created_and_started_rows_time_out(tables: Tables, clock: ManualClock) -> None:
    # データベース操作仕様: status IN (0, 1); 備考: from created and started to timeout (3).
    for status in ALL_STATES:
        tables.add_imports(1, STALE, status, first_id=10 + status)
        tables.add_entities(1, STALE, status, first_id=10 + status)

    run_sweep(sweep, clock=clock)

    after = {10 + status: 3 if status in (0, 1) else status for status in ALL_STATES}
    assert {id: status for id, status in tables.imports().items() if id < 100} == after
    assert tables.entities() == after


def test_open_trackers_time_out_with_their_entity(tables: Tables, clock: ManualClock) -> None:
    # 主要な処理内容 5. A tracker's timeout is 4; finished, failed, skipped and canceled ones stay.
    tables.add_entities(1)
    tables.add_trackers(1, "0, 1, 3, 2, 4, -1, -2, -3", FRESH)

    result = run_sweep(sweep, clock=clock)

    assert tables.trackers() == [4, 4, 4, 2, 4, -1, -2, -3]
    assert result.counts == NOTHING | {"timed_out_entities": 1, "timed_out_trackers": 3}


def test_a_stale_tracker_of_a_fresh_entity_stays(tables: Tables, clock: ManualClock) -> None:
    tables.add_entities(1, FRESH)
    tables.add_trackers(1, "0, 1, 3", STALE)

    assert run_sweep(sweep, clock=clock).counts == NOTHING
    assert tables.trackers() == [0, 1, 3]


def test_stale_import_and_fresh_entity_are_independent(tables: Tables, clock: ManualClock) -> None:
    # document 65: each on its own row.
    tables.add_imports(1, STALE, first_id=1)
    tables.add_entities(1, FRESH, of=1)
    tables.add_imports(1, FRESH, first_id=2)
    tables.add_entities(1, STALE, first_id=2, of=2)

    run_sweep(sweep, clock=clock)

    assert (tables.imports(), tables.entities()) == ({1: 3, 2: 1}, {1: 1, 2: 3})


def test_every_change_sets_updated_at_and_nothing_else(
    tables: Tables, clock: ManualClock, times: DatabaseTimes
) -> None:
    # document 65, 出力仕様: the status column. Every change sets updated_at.
    tables.add_imports(1)
    tables.add_entities(1)
    tables.add_trackers(1, "1, 2")
    look = [f"SELECT to_jsonb(t) - 'status' - 'updated_at' FROM {table} AS t ORDER BY t.id" for table in MODELS]
    before = [tables.do(query) for query in look]

    run_sweep(sweep, clock=clock)

    assert [tables.do(query) for query in look] == before
    since = f"updated_at BETWEEN '{times.noted[0]}' AND now()"
    changed = [tables.do(f"SELECT {since} FROM {table} ORDER BY id") for table in MODELS]
    assert changed == [[(True,), (False,)], [(True,)], [(True,), (False,)]], "what was finished has not changed"


def test_next_batch_starts_after_the_time_before_the_change(tables: Tables, clock: ManualClock) -> None:
    # 処理フロー, Keysetページネーション. All have one time but for their ids; 25 batches, each row met once.
    tables.add_imports(50, STALE)
    tables.add_entities(50, f"{STALE} - interval '1 hour' * (n % 3)")
    shortest = changed(SMALL, batch=2, options={"page_size": 2, "log_records": True})

    with heard(import_timed_out) as imports, heard(entity_timed_out) as entities:
        result = run_sweep(shortest, clock=clock)

    assert (result.counts["timed_out_imports"], result.counts["timed_out_entities"]) == (50, 50)
    assert [len(rows) for rows in imports] == [2] * 25
    assert [row["bulk_import_id"] for rows in imports for row in rows] == list(range(1, 51))
    met = [row["bulk_import_entity_id"] for rows in entities for row in rows]
    assert met == sorted(range(1, 51), key=lambda n: (-(n % 3), n)), "oldest first"


def test_each_import_and_entity_has_an_error_line(
    tables: Tables, clock: ManualClock, lines: Callable[[str], list[dict[str, Any]]]
) -> None:
    # ログ出力
    tables.add_imports(2, first_id=5)
    tables.add_entities(2, first_id=10)

    run_sweep(sweep, clock=clock)

    imports, entities = lines("BulkImport stale"), lines("BulkImports::Entity stale")
    assert [line["levelno"] for line in (*imports, *entities)] == [logging.ERROR] * 4
    assert [line["bulk_import_id"] for line in imports] == [5, 6]
    fields = ("bulk_import_id", "bulk_import_entity_id", "bulk_import_entity_type", "source_full_path")
    assert [tuple(line[name] for name in fields) for line in entities] == [
        (1_000_000, 10, "group_entity", "old/group-10"),
        (1_000_000, 11, "project_entity", "old/group-11"),
    ]
    assert all(line["worker"] == sweep.name and line["run_id"] for line in (*imports, *entities))


def test_record_lines_can_be_disabled(
    tables: Tables, clock: ManualClock, lines: Callable[[str], list[dict[str, Any]]]
) -> None:
    tables.add_imports(1)
    tables.add_entities(1)

    result = run_sweep(sweep.configured(WorkerSettings(log_records=False)), clock=clock)

    assert (result.counts["timed_out_imports"], result.counts["timed_out_entities"]) == (1, 1)
    assert lines("BulkImport stale") == lines("BulkImports::Entity stale") == []


Lines = Callable[[str], list[dict[str, Any]]]


def test_poison_row_is_tried_once_per_run_and_raises_an_alert(tables: Tables, clock: ManualClock, lines: Lines) -> None:
    # 監視・アラート, エラー件数: no limit of its own; every failed row raises an alert.
    tables.add_imports(25)
    tables.refuse("bulk_imports", "OLD.id = 1")

    first = run_sweep(SMALL, clock=clock)
    second = run_sweep(SMALL, clock=clock)

    assert (first.counts["timed_out_imports"], first.counts["failed"]) == (24, 1)
    assert (second.outcome, second.counts["timed_out_imports"], second.counts["failed"]) == ("done", 0, 1)
    assert [line["alarm"] for line in lines("Alert")] == ["failed_rows"] * 2
