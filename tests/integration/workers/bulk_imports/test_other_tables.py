"""Tables of real installations: more columns, other names, partitions, and sessions in other time zones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings, Sweep
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.bulk_imports.models import BulkImportEntity
from tests.integration.conftest import Do
from tests.integration.workers.bulk_imports.conftest import STALE
from tests.integration.workers.partitioned import create_partitioned
from tests.internals.database import Database, connect_to, database, restore_declared_key
from tests.internals.engine import run_sweep
from tests.internals.workers import IMPORT_MODELS as MODELS
from tests.internals.workers import configured_sweeps

_ROWS = f"""
INSERT INTO p_bulk_imports (id, partition_id, user_id, source_type, status, created_at, updated_at)
SELECT n, 100 + n % 2, 7, 0, n % 4, {STALE}, {STALE} FROM generate_series(1, 40) AS n;
INSERT INTO p_bulk_import_entities (id, partition_id, bulk_import_id, namespace_id, source_type, source_full_path,
    destination_name, destination_namespace, status, created_at, updated_at)
SELECT n, 100 + n % 2, n, 1, n % 2, 'g' || n, 'g', 'new', n % 4, {STALE}, {STALE} FROM generate_series(1, 40) AS n;
INSERT INTO p_bulk_import_trackers (partition_id, bulk_import_entity_id, relation, status)
SELECT 100 + s % 2, n, 'relation ' || s, s FROM generate_series(1, 40) AS n, unnest(ARRAY[0, 1, 2, 3]) AS s;
"""


@pytest.fixture
def partitioned(settings: Settings, postgres: Database, admin: Connection, do: Do) -> Iterator[Sweep]:
    """The worker on partitioned tables with a prefix, in a session that is hours away from UTC."""
    tables = create_partitioned(postgres, admin, MODELS)
    do(_ROWS)
    assert settings.database_url is not None
    before = database.obj
    elsewhere = connect_to(settings.database_url + "%20-ctimezone%3DPacific/Kiritimati")
    database.initialize(elsewhere)
    given = {"bulk_imports.stale_import": {"tables": tables, "page_size": 7, "batch_size": 7}}
    yield configured_sweeps(Settings.load(workers=json.dumps(given)))["bulk_imports.stale_import"]
    configured_sweeps(Settings.load())
    elsewhere.close()
    database.initialize(before)


def test_entities_without_their_labels_are_timed_out(
    partitioned: Sweep, do: Do, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    do("ALTER TABLE p_bulk_import_entities DROP COLUMN source_type, DROP COLUMN source_full_path")

    result = run_sweep(partitioned, clock=clock)

    restore_declared_key(BulkImportEntity)
    lines = [vars(record) for record in caplog.records if record.message == "BulkImports::Entity stale"]
    assert (result.outcome, result.counts["timed_out_entities"], len(lines)) == ("done", 20, 20)
    assert all("bulk_import_id" in line and "source_full_path" not in line for line in lines)


def test_interrupted_run_resumes_in_another_time_zone(partitioned: Sweep, do: Do, clock: ManualClock) -> None:
    def fail_after_two_pages(counts: dict[str, Any]) -> None:
        if counts["timed_out_imports"] == 14:
            raise OSError("broken off")

    broken = run_sweep(partitioned, clock=clock, on_batch=fail_after_two_pages)
    again = run_sweep(partitioned, clock=clock)

    assert (broken.outcome, broken.counts["timed_out_imports"]) == ("failed", 14)
    assert (again.outcome, again.counts["timed_out_imports"], again.counts["timed_out_entities"]) == ("done", 6, 20)


def test_entity_of_a_partitioned_table_changes_its_trackers(partitioned: Sweep, do: Do) -> None:
    BulkImportEntity.get_by_id(4).cleanup_stale()

    assert do("SELECT status FROM p_bulk_import_trackers WHERE bulk_import_entity_id = 4 ORDER BY id") == [
        *((4,), (4,), (2,), (4,))
    ]
