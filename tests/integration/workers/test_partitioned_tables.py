"""Every built-in worker on tables that are partitioned by ``partition_id``, which is a part of their primary keys."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import redis
from peewee import Model
from psycopg2.extensions import connection as Connection

from housekeeping import Settings, Sweep
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.integration.purge.conftest import purge
from tests.integration.workers.partitioned import create_partitioned
from tests.internals.database import Database, restore_declared_key
from tests.internals.doctor import stages as doctor_stages
from tests.internals.engine import PurgeRequest, run_sweep
from tests.internals.insight import plan
from tests.internals.workers import BUILD_MODELS as BUILDS
from tests.internals.workers import GIT_MODELS as GIT
from tests.internals.workers import IMPORT_MODELS as IMPORTS
from tests.internals.workers import STATUS_MODELS as STATUSES
from tests.internals.workers import configured_sweeps

MODELS: dict[str, type[Model]] = {**STATUSES, **IMPORTS, **BUILDS, **GIT}
WORKERS = {
    "user_status_cleanup.batch": {"table": "p_user_statuses"},
    "bulk_imports.stale_import": {"tables": {name: f"p_{name}" for name in IMPORTS}},
    "ci.stuck_builds.drop_canceling": {"table": "p_ci_builds"},
    "batched_git_ref_updates.cleanup_scheduler": {"table": "p_batched_git_ref_updates_deletions"},
    "batched_git_ref_updates.processed_deletions": {"enabled": True, "batch_size": 2},
}
AGO = "now() - interval '30 days'"
#: Worker -> its rows. Ids are the same in both partitions, except those of imports, which come from one sequence.
ROWS = {
    "user_status_cleanup.batch": f"""
        INSERT INTO p_user_statuses (user_id, partition_id, clear_status_at)
        SELECT n, p, {AGO} FROM generate_series(1, 5) AS n, unnest(ARRAY[100, 101]) AS p""",
    "bulk_imports.stale_import": f"""
        INSERT INTO p_bulk_imports (id, partition_id, user_id, status, created_at, updated_at)
        SELECT n, 100 + n % 2, 1, 1, {AGO}, {AGO} FROM generate_series(1, 10) AS n""",
    "ci.stuck_builds.drop_canceling": f"""
        INSERT INTO p_ci_builds (id, partition_id, type, status, created_at, updated_at)
        SELECT n, p, 'Ci::Build', 'canceling', {AGO}, {AGO}
        FROM generate_series(1, 5) AS n, unnest(ARRAY[100, 101]) AS p""",
    "batched_git_ref_updates.processed_deletions": f"""
        INSERT INTO p_batched_git_ref_updates_deletions (id, partition_id, project_id, ref, status, updated_at)
        SELECT n, p, 1, 'refs/heads/' || n, 2, CASE n WHEN 5 THEN now() ELSE {AGO} END
        FROM generate_series(0, 5) AS n, unnest(ARRAY[100, 101]) AS p""",
}


@pytest.fixture
def workers(postgres: Database, redis_client: redis.Redis, admin: Connection) -> Iterator[dict[str, Sweep]]:
    """All workers, configured for partitioned tables."""
    create_partitioned(postgres, admin, MODELS)
    yield configured_sweeps(Settings.load(workers=json.dumps(WORKERS)))
    configured_sweeps(Settings.load())
    for model in MODELS.values():
        restore_declared_key(model)


@pytest.mark.parametrize(("worker", "rows"), [(worker, statement) for worker, statement in ROWS.items()], ids=ROWS)
def test_each_row_of_each_partition_is_processed_once(
    workers: dict[str, Sweep], admin: Connection, worker: str, rows: str
) -> None:
    with admin.cursor() as cursor:
        cursor.execute(rows)
    sweep = workers[worker]

    planned, first, second = plan(sweep), run_sweep(sweep, confirmed=True), run_sweep(sweep, confirmed=True)

    processed = [sum(result.counts[name] for name in sweep.progress_counts) for result in (first, second)]
    assert (first.outcome, first.error) == ("done", None)
    assert (planned.stale.rows, processed) == (10, [10, 0])


def test_kept_rows_of_each_partition_stay(workers: dict[str, Sweep], admin: Connection) -> None:
    name = "batched_git_ref_updates.processed_deletions"
    with admin.cursor() as cursor:
        cursor.execute(ROWS[name])

    run_sweep(workers[name], confirmed=True)

    with admin.cursor() as cursor:
        cursor.execute("SELECT id, partition_id FROM p_batched_git_ref_updates_deletions ORDER BY 1, 2")
        assert cursor.fetchall() == [(5, 100), (5, 101)]


def test_doctor_finds_no_wrong_key(workers: dict[str, Sweep], settings: Settings) -> None:
    found = [each for each in doctor_stages.examine_stages(settings, workers) if each.subject.startswith("key")]

    assert [each for each in found if each.level != "fine"] == []


def test_purge_deletes_each_row_of_each_partition(workers: dict[str, Sweep], admin: Connection) -> None:
    with admin.cursor() as cursor:
        cursor.execute(ROWS["user_status_cleanup.batch"])

    result = purge(PurgeRequest(table="p_user_statuses", where="user_id < 5", batch_size=3))

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 8)


def test_single_deletion_is_processed_in_its_own_partition(workers: dict[str, Sweep], admin: Connection) -> None:
    with admin.cursor() as cursor:
        cursor.execute(
            "INSERT INTO p_batched_git_ref_updates_deletions (id, partition_id, project_id, ref) "
            "VALUES (1, 100, 1, 'refs/heads/a'), (1, 101, 1, 'refs/heads/b')"
        )

    Deletion.get(Deletion.ref == "refs/heads/b").process()

    with admin.cursor() as cursor:
        cursor.execute("SELECT partition_id, status FROM p_batched_git_ref_updates_deletions ORDER BY 1")
        assert cursor.fetchall() == [(100, 1), (101, 2)]
