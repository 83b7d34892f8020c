"""A million records of each worker, a hundred thousand of them stale: a run ends in constant memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from housekeeping.workers.ci_stuck_builds.models import Build
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.conftest import RunMeasured
from tests.integration.workers.batched_git_ref_updates.repositories import made
from tests.internals.database import Database, restore_declared_key
from tests.internals.embedded import embedded
from tests.internals.workers import IMPORT_MODELS as MODELS
from tests.internals.workers import pending_entry

pytestmark = pytest.mark.slow


def test_hundred_thousand_stale_statuses_clear_in_constant_memory(
    postgres: Database, admin: Connection, run_measured: RunMeasured
) -> None:
    postgres.create_tables([UserStatus])
    with admin.cursor() as cursor:
        cursor.execute(
            "INSERT INTO user_statuses (user_id, clear_status_at) "
            "SELECT n, now() + interval '1 second' * (n - 100000) FROM generate_series(1, 1000000) AS n"
        )
        cursor.execute("ANALYZE user_statuses")
    settings = {"user_status_cleanup.batch": {"batch_size": 1000, "max_runtime_s": 300}}

    run = run_measured("user_status_cleanup.batch", HOUSEKEEPING_WORKERS=json.dumps(settings))

    assert run.result["outcome"] == "done"
    assert 100_000 <= run.result["counts"]["deleted_rows"] <= 100_300, "and those that came due meanwhile"
    assert run.resident_mb < 200


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


TOTAL = 1_000_000
STALE = 100_000
PER_FOLDER = 1_000
#: Entries as `prepare` writes them, created in the server.
PREPARE = """
for n = tonumber(ARGV[1]), ARGV[1] + ARGV[2] - 1 do
  local folder = math.floor(n / ARGV[3])
  redis.call("hset", KEYS[1], string.format("artifacts:%d/%d", folder, n % ARGV[3]), ARGV[4])
end
"""


@pytest.fixture
def own_redis() -> Iterator[str]:
    """Return a dedicated server: a real process uses the hash by its real name."""
    with embedded.start(postgres=False) as servers:
        yield servers.redis_url


def test_hundred_thousand_stale_uploads_are_removed_in_constant_memory(
    postgres: Database, own_redis: str, tmp_path: Path, run_measured: RunMeasured
) -> None:
    for folder in range(STALE // PER_FOLDER):
        (tmp_path / str(folder)).mkdir()
        for number in range(0, PER_FOLDER, 10):
            os.close(os.open(f"{tmp_path}/{folder}/{number}", os.O_CREAT))
    client: Any = redis.Redis.from_url(own_redis)
    for part in range(TOTAL // STALE):
        age = 20_000 if part == 0 else 60
        client.eval(PREPARE, 1, pending_entry.KEY, part * STALE, STALE, PER_FOLDER, int(time.time()) - age)
    client.hset(pending_entry.KEY, mapping={"artifacts:../poison": 1, "nowhere:poison": 1})

    run = run_measured(
        "object_storage.delete_stale_direct_uploads",
        HOUSEKEEPING_REDIS_URL=own_redis,
        HOUSEKEEPING_OBJECT_STORES=json.dumps({"artifacts": f"file://{tmp_path}"}),
    )

    assert run.result["outcome"] == "done"
    assert run.result["counts"] == {
        "total_pending_entries": TOTAL + 2,
        "total_deleted_stale_entries": STALE,
        "execution_timeout": False,
        "failed": 2,
    }
    assert client.hlen(pending_entry.KEY) == TOTAL - STALE + 2
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert run.resident_mb < 200
    client.close()
