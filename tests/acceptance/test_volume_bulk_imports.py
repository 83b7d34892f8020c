"""A million imported entities, a hundred thousand of them stale, with their dependent rows."""

from __future__ import annotations

import pytest
from psycopg2.extensions import connection as Connection

from tests.acceptance.conftest import RunMeasured
from tests.internals.database import Database
from tests.internals.workers import IMPORT_MODELS as MODELS

pytestmark = pytest.mark.slow

#: Number of stale rows. The others change afterward, one a minute, and none becomes stale within a day.
_AGE = (
    "now() - interval '24 hours' + interval '1 minute' * (n - {0}) "
    "+ CASE WHEN n > {0} THEN interval '1 day' ELSE '0' END"
)
_IMPORTS = f"""
INSERT INTO bulk_imports (id, user_id, status, updated_at)
SELECT n, 1, 1, {_AGE.format(10_000)} FROM generate_series(1, 100000) AS n
"""
_ENTITIES = f"""
INSERT INTO bulk_import_entities (id, bulk_import_id, namespace_id, source_type, source_full_path, status, updated_at)
SELECT n, 1 + n % 100000, 1, 0, 'group/' || n, 1, {_AGE.format(100_000)} FROM generate_series(1, 1000000) AS n
"""
_TRACKERS = """
INSERT INTO bulk_import_trackers (bulk_import_entity_id, relation, status)
SELECT n, 'members', 3 FROM generate_series(1, 100000) AS n
"""


def test_hundred_thousand_stale_entities_time_out_in_constant_memory(
    postgres: Database, admin: Connection, run_measured: RunMeasured
) -> None:
    postgres.create_tables(list(MODELS.values()))
    with admin.cursor() as cursor:
        cursor.execute("SET session_replication_role = replica")  # skips the foreign key checks
        for statement in (_IMPORTS, _ENTITIES, _TRACKERS):
            cursor.execute(statement)
        cursor.execute("ANALYZE bulk_imports; ANALYZE bulk_import_entities; ANALYZE bulk_import_trackers")

    run = run_measured("bulk_imports.stale_import")

    assert run.result["outcome"] == "done"
    assert run.result["counts"] == {
        "timed_out_imports": 10_000,
        "timed_out_entities": 100_000,
        "timed_out_trackers": 100_000,
        "failed": 0,
        "out_of_time": False,
    }
    assert run.resident_mb < 200
