"""Runs while a server is unavailable: their outcome and remaining state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping.core.errors import DatabaseUnavailable, RedisUnavailable
from housekeeping.core.redis.client import redis_client as client_for
from housekeeping.core.redis.client import shared_redis
from housekeeping.database.connection import Database, connect_to, database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger.runs import Counts
from housekeeping.testing import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from housekeeping.workers.ci_stuck_builds.worker import SWEEPS, drop_canceling
from tests.integration.workers.ci_stuck_builds.tables import STALE, AddBuilds, by_status


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.name)
def test_redis_outage_retries_without_running_unprotected(
    builds: type[Build], add_builds: AddBuilds, clock: ManualClock, last_run: Callable[[], Any], sweep: Sweep
) -> None:
    add_builds(1, "canceling", STALE, STALE)
    shared_redis.use(client_for("redis://127.0.0.1:1/0"), shared_redis.namespace)

    result = run_sweep(sweep, clock=clock)

    assert result.outcome == "failed"
    assert str(result.reason).startswith("Redis did not answer")
    assert (last_run().outcome, by_status()) == ("failed", {"canceling": [1]})
    with pytest.raises(RedisUnavailable):
        result.raise_for_failure()


def test_database_outage_fails_the_run_for_a_retry(builds: type[Build], postgres: Database, clock: ManualClock) -> None:
    database.initialize(connect_to("postgresql://nobody@127.0.0.1:1/nothing"))

    result = run_sweep(drop_canceling, clock=clock)

    database.initialize(postgres)
    assert (result.outcome, result.run_id) == ("failed", None)
    assert str(result.reason).startswith("database: ")
    with pytest.raises(DatabaseUnavailable):
        result.raise_for_failure()


def test_lost_connection_keeps_committed_work(
    builds: type[Build], add_builds: AddBuilds, admin: Connection, last_run: Callable[[], Any]
) -> None:
    # トランザクション仕様: committed batches stay, the current batch is rolled back.
    add_builds(500, "canceling", STALE, STALE)

    def cut(counts: Counts) -> None:
        if counts["dropped"] == 200:
            with admin.cursor() as cursor:
                cursor.execute(
                    "CREATE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS "
                    "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NEW; END $$;"
                    "CREATE TRIGGER cut BEFORE UPDATE ON ci_builds FOR EACH ROW EXECUTE FUNCTION cut()"
                )

    result = run_sweep(drop_canceling, clock=ManualClock(), on_batch=cut)

    assert (result.outcome, result.counts["dropped"]) == ("failed", 200)
    assert (last_run().outcome, last_run().counts["dropped"]) == ("failed", 200)
    assert len(by_status()["canceling"]) == 300
    with admin.cursor() as cursor:
        cursor.execute("DROP TRIGGER cut ON ci_builds")
    assert run_sweep(drop_canceling, clock=ManualClock()).counts["dropped"] == 300


def test_run_without_its_lease_commits_nothing(
    builds: type[Build], add_builds: AddBuilds, redis_client: redis.Redis
) -> None:
    # 排他制御: the epoch is checked in the batch's own transaction.
    add_builds(500, "canceling", STALE, STALE)
    others: list[Any] = []

    def be_overtaken(counts: Counts) -> None:
        if counts["dropped"] == 100 and not others:
            redis_client.delete(f"{shared_redis.namespace}:lease:ci/stuck_builds/drop_canceling")
            others.append(run_sweep(drop_canceling, clock=ManualClock()))

    result = run_sweep(drop_canceling, clock=ManualClock(), on_batch=be_overtaken)

    assert (others[0].outcome, others[0].counts["dropped"]) == ("done", 400)
    assert (result.outcome, result.counts["dropped"]) == ("lost_lease", 100)
    assert Build.select().where(Build.lock_version == 4).count() == 500
