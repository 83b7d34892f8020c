"""Tables of real installations: more columns, other names, partitions, and sessions in other time zones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings, Sweep
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.bulk_imports.models import BulkImportEntity
from tests.integration.workers.bulk_imports.conftest import STALE
from tests.internals.core import SettingsError
from tests.internals.database import Database, connect_to, database, restore_declared_key
from tests.internals.engine import run_sweep
from tests.internals.workers import IMPORT_MODELS as MODELS
from tests.internals.workers import configured_sweeps

#: Each row in a partition of its own; the stale predicate's index on each.
_PARTITIONED = """
CREATE TABLE p_bulk_imports (
    id bigint NOT NULL, partition_id bigint NOT NULL DEFAULT 100, user_id integer NOT NULL,
    source_type smallint NOT NULL, status smallint NOT NULL, source_version text,
    source_enterprise boolean NOT NULL DEFAULT true, has_failures boolean DEFAULT false,
    created_at timestamptz NOT NULL, updated_at timestamptz NOT NULL,
    PRIMARY KEY (id, partition_id)
) PARTITION BY LIST (partition_id);
CREATE TABLE p_bulk_imports_100 PARTITION OF p_bulk_imports FOR VALUES IN (100);
CREATE TABLE p_bulk_imports_101 PARTITION OF p_bulk_imports FOR VALUES IN (101);
CREATE INDEX ON p_bulk_imports (updated_at, id) WHERE status IN (0, 1);
CREATE TABLE p_bulk_import_entities (
    id bigint NOT NULL, partition_id bigint NOT NULL DEFAULT 100, bulk_import_id bigint NOT NULL, parent_id bigint,
    namespace_id bigint, project_id bigint, organization_id bigint, source_type smallint NOT NULL,
    source_full_path text NOT NULL, destination_name text NOT NULL, destination_namespace text NOT NULL,
    status smallint NOT NULL, jid text, created_at timestamptz NOT NULL, updated_at timestamptz NOT NULL,
    source_xid integer, migrate_projects boolean NOT NULL DEFAULT true, has_failures boolean DEFAULT false,
    migrate_memberships boolean NOT NULL DEFAULT true, PRIMARY KEY (id, partition_id)
) PARTITION BY LIST (partition_id);
CREATE TABLE p_bulk_import_entities_100 PARTITION OF p_bulk_import_entities FOR VALUES IN (100);
CREATE TABLE p_bulk_import_entities_101 PARTITION OF p_bulk_import_entities FOR VALUES IN (101);
CREATE INDEX ON p_bulk_import_entities (updated_at, id) WHERE status IN (0, 1);
CREATE TABLE p_bulk_import_trackers (
    id bigint NOT NULL GENERATED ALWAYS AS IDENTITY, partition_id bigint NOT NULL DEFAULT 100,
    bulk_import_entity_id bigint NOT NULL, relation text NOT NULL, next_page text,
    has_next_page boolean NOT NULL DEFAULT false, jid text, stage smallint NOT NULL DEFAULT 0, status smallint NOT NULL,
    created_at timestamptz, updated_at timestamptz, source_objects_count bigint NOT NULL DEFAULT 0,
    fetched_objects_count bigint NOT NULL DEFAULT 0, PRIMARY KEY (id, partition_id)
) PARTITION BY LIST (partition_id);
CREATE TABLE p_bulk_import_trackers_100 PARTITION OF p_bulk_import_trackers FOR VALUES IN (100);
CREATE TABLE p_bulk_import_trackers_101 PARTITION OF p_bulk_import_trackers FOR VALUES IN (101);
CREATE UNIQUE INDEX ON p_bulk_import_trackers (bulk_import_entity_id, relation, partition_id);
"""
_ROWS = f"""
INSERT INTO p_bulk_imports (id, partition_id, user_id, source_type, status, created_at, updated_at)
SELECT n, 100 + n % 2, 7, 0, n % 4, {STALE}, {STALE} FROM generate_series(1, 40) AS n;
INSERT INTO p_bulk_import_entities (id, partition_id, bulk_import_id, namespace_id, source_type, source_full_path,
    destination_name, destination_namespace, status, created_at, updated_at)
SELECT n, 100 + n % 2, n, 1, n % 2, 'g' || n, 'g', 'new', n % 4, {STALE}, {STALE} FROM generate_series(1, 40) AS n;
INSERT INTO p_bulk_import_trackers (partition_id, bulk_import_entity_id, relation, status)
SELECT 100 + s % 2, n, 'relation ' || s, s FROM generate_series(1, 40) AS n, unnest(ARRAY[0, 1, 2, 3]) AS s;
"""
NAMES = {name: f"p_{name}" for name in MODELS}
TABLES = json.dumps({"bulk_imports.stale_import": {"tables": NAMES, "page_size": 7, "batch_size": 7}})

Do = Callable[[str], list[tuple[Any, ...]]]


@pytest.fixture
def do(postgres: Database, admin: Connection) -> Do:
    def execute(statement: str) -> list[tuple[Any, ...]]:
        with admin.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    return execute


@pytest.fixture
def partitioned(settings: Settings, do: Do) -> Iterator[Sweep]:
    """The worker on partitioned tables with a prefix, in a session that is hours away from UTC."""
    do(_PARTITIONED)
    do(_ROWS)
    assert settings.database_url is not None
    before = database.obj
    elsewhere = connect_to(settings.database_url + "%20-ctimezone%3DPacific/Kiritimati")
    database.initialize(elsewhere)
    given = Settings.load(workers=TABLES)
    yield configured_sweeps(given)["bulk_imports.stale_import"]
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


@pytest.mark.parametrize("wrong", [{"table": "imports"}, {"tables": {"imports": "p_imports"}}])
def test_unknown_tables_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="bulk_imports, bulk_import_entities, bulk_import_trackers"):
        configured_sweeps(Settings.load(workers=json.dumps({"bulk_imports.stale_import": wrong})))
