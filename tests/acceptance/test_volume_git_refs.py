"""A million rows, a hundred thousand of them pending: of many projects, and of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.acceptance.conftest import RunMeasured
from tests.integration.workers.batched_git_ref_updates.repositories import made
from tests.internals.database import Database

pytestmark = pytest.mark.slow

SCHEDULER = "batched_git_ref_updates.cleanup_scheduler"
CLEANUP = "batched_git_ref_updates.project_cleanup"


def fill(postgres: Database, admin: Connection, project: str, ref: str = "n") -> None:
    """Insert 900,000 processed and 100,000 pending rows; SQL expressions give each row's project and ref."""
    postgres.create_tables([Deletion])
    with admin.cursor() as cursor:
        cursor.execute(
            "INSERT INTO batched_git_ref_updates_deletions (project_id, ref, status) "
            f"SELECT {project}, 'refs/heads/' || {ref}, CASE WHEN n % 10 = 0 THEN 1 ELSE 2 END "
            "FROM generate_series(1, 1000000) AS n"
        )
        cursor.execute("ANALYZE batched_git_ref_updates_deletions")


def test_twenty_thousand_projects_are_enqueued_in_constant_memory(
    postgres: Database, admin: Connection, run_measured: RunMeasured, settings: Settings, redis_client: redis.Redis
) -> None:
    fill(postgres, admin, "n / 50")

    first = run_measured(SCHEDULER)
    second = run_measured(SCHEDULER, HOUSEKEEPING_WORKERS=json.dumps({SCHEDULER: {"max_projects": 30_000}}))

    assert (first.result["outcome"], first.result["reason"]) == ("partial", "limit")
    assert first.result["counts"] == {"total_projects": 10_000, "enqueued": 10_000, "deduplicated": 0}
    assert second.result["outcome"] == "done"
    assert second.result["counts"] == {"total_projects": 20_001, "enqueued": 10_001, "deduplicated": 10_000}
    assert redis_client.llen(f"{settings.namespace}:broker:git_refs") == 20_001
    assert max(first.resident_mb, second.resident_mb) < 200


def test_hundred_thousand_rows_of_a_project_end_in_constant_memory(
    postgres: Database, admin: Connection, run_measured: RunMeasured, tmp_path: Path
) -> None:
    # Twenty rows for each ref: a thousand rows cost git fifty refs, so git's speed is not measured.
    fill(postgres, admin, "1", ref="n / 200")
    bare = made(tmp_path, 1)
    bare.add_many((f"refs/heads/{number}" for number in range(4_001, 6_001)), packed=False)

    run = run_measured(
        CLEANUP,
        "1",
        HOUSEKEEPING_REPOSITORIES_ROOT=str(tmp_path),
        HOUSEKEEPING_WORKERS=json.dumps({CLEANUP: {"max_deletes": 200_000}}),
    )

    assert run.result["outcome"] == "done"
    assert run.result["counts"] == {"total_deletes": 100_000, "invalid": 0, "failed": 0}
    assert sorted(bare.refs()) == [f"refs/heads/{number}" for number in range(5_001, 6_001)]
    assert run.resident_mb < 200
