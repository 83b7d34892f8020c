from __future__ import annotations

from datetime import UTC, datetime, timedelta

from psycopg2.extensions import connection as Connection

from housekeeping.foundation.db import Database
from housekeeping.foundation.settings import Settings
from housekeeping.sweeps.own_tables import Run
from housekeeping.sweeps.run import perform
from housekeeping.testing import ManualClock
from housekeeping.workers.old_runs.worker import sweep


def test_runs_older_than_30_days_go_and_unfinished_ones_stay(
    postgres: Database, admin: Connection, settings: Settings
) -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    limit = now - timedelta(days=30)
    instant = timedelta(microseconds=1)
    with admin.cursor() as cursor:
        for finished_at in (limit - instant, limit, limit + instant, None):
            cursor.execute(
                f"INSERT INTO {settings.schema_name}.runs (worker, trigger, started_at, finished_at, outcome) "
                "VALUES ('x', 'cli', %s, %s, %s)",
                (limit - timedelta(days=1), finished_at, "done" if finished_at else None),
            )

    result = perform(sweep, clock=ManualClock(now))

    assert result.counts["deleted_rows"] == 1
    kept = [run.finished_at for run in Run.select().where(Run.worker == "x").order_by(Run.id)]
    assert kept == [limit, limit + instant, None]
