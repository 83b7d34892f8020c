"""A million builds, a hundred thousand of them stuck."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from housekeeping.workers.ci_stuck_builds.models import Build
from tests.acceptance.conftest import RunMeasured
from tests.internals.database import Database, restore_declared_key

pytestmark = pytest.mark.slow

#: The other builds have ended, as most do, or run.
_BUILDS = """
INSERT INTO ci_builds (type, status, created_at, updated_at, project_id, runner_id, name, stage, commit_id)
SELECT 'Ci::Build',
       CASE WHEN n <= 100000 THEN 'canceling' WHEN n % 100 = 0 THEN 'running' ELSE 'success' END,
       (now() AT TIME ZONE 'UTC') - interval '2 hours' - interval '1 second' * (n % 50000),
       (now() AT TIME ZONE 'UTC') - interval '2 hours' - interval '1 second' * (n % 50000),
       n % 1000, n % 50, 'rspec ' || n % 20, 'test', n / 10
FROM generate_series(1, 1000000) AS n
"""


@pytest.fixture
def builds(postgres: Database) -> Iterator[None]:
    """Create builds; the indexes follow, which is faster."""
    table: Any = Build
    table._schema.create_table()
    postgres.execute_sql(_BUILDS.replace("%", "%%"))
    table._schema.create_indexes()
    postgres.execute_sql("ANALYZE ci_builds")
    yield
    restore_declared_key(Build)


def test_hundred_thousand_stuck_builds_are_dropped_in_constant_memory(builds: None, run_measured: RunMeasured) -> None:
    settings = {"ci.stuck_builds.drop_canceling": {"batch_size": 1000}}

    run = run_measured("ci.stuck_builds.drop_canceling", HOUSEKEEPING_WORKERS=json.dumps(settings))

    assert run.result["outcome"] == "done"
    assert run.result["counts"] == {"dropped": 100_000, "doomed": 0, "failed": 0, "out_of_time": False}
    assert run.resident_mb < 200
