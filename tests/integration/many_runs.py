"""A hundred thousand runs in the ledger, as an installation with sixty workers has them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from tests.internals.database import Database
from tests.internals.ledger import Run

RUNS: Final = 100_000
WORKERS: Final = 60
#: The time within which all of them are.
WEEK: Final = timedelta(seconds=600_000)


def many_runs(
    postgres: Database, end: datetime | None = None, *, worker: str = "shop.worker_", runs: int = RUNS
) -> datetime:
    """Write the runs ``shop.worker_0`` to ``shop.worker_59``; return when the last one began.

    One in a thousand failed or was lost, one in twenty was skipped, the last twenty are open. One in 5,000 was started
    by hand, one in fifty by another run.
    """
    end = end or datetime.now(UTC)
    postgres.execute_sql(
        f'INSERT INTO "{Run._meta.schema}".runs '
        "(worker, trigger, started_at, heartbeat_at, finished_at, outcome, counts, message_id, host, pid, backlog, "
        "backlog_exact) "
        "SELECT %s || mod(n, %s), "
        "CASE WHEN mod(n, 5000) = 4 THEN 'cli' WHEN mod(n, 50) = 3 THEN 'parent' ELSE 'schedule' END, "
        "t, t, CASE WHEN n <= %s THEN t + interval '2 seconds' END, "
        "CASE WHEN n > %s THEN NULL WHEN mod(n, 1000) = 0 THEN 'failed' WHEN mod(n, 1000) = 500 THEN 'lost' "
        "WHEN mod(n, 20) = 1 THEN 'skipped' ELSE 'done' END, "
        """jsonb_build_object('deleted_rows', mod(n, 100), 'batches', 1, 'out_of_time', false), n::text, """
        "'host-' || mod(n, 4), 100 + mod(n, 4), mod(n, 500), true "
        "FROM (SELECT n, %s::timestamptz - (%s - n) * %s::interval AS t FROM generate_series(1, %s) AS n) AS made",
        (worker, WORKERS, runs - 20, runs - 20, end, runs, WEEK / runs, runs),
    )
    postgres.execute_sql(f'ANALYZE "{Run._meta.schema}".runs')
    return end
