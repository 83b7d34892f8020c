"""Sample CI builds: stuck in four statuses, active, ended, and a few with damaged data."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database
from housekeeping.workers.ci_stuck_builds.models import Build

TITLE: Final = "CI BUILDS"
STUCK: Final = 2_000  # of each kind: canceling, running, scheduled, pending
AT_WORK: Final = 1_500
ENDED: Final = 20_000
DAMAGED: Final = 3  # canceling, with the largest possible version: they cannot be dropped, only doomed

_STATUSES: Final = ("canceling", "running", "scheduled", "pending")
_SEED: Final = """
INSERT INTO {table}
    (type, status, created_at, updated_at, finished_at, scheduled_at, project_id, runner_id, name, stage, commit_id,
     failure_reason, lock_version)
SELECT 'Ci::Build', status, began, began + interval '1 minute', CASE WHEN ended THEN began + interval '9 minutes' END,
       CASE WHEN status = 'scheduled' THEN began AT TIME ZONE 'UTC' + interval '10 minutes' END,
       1 + n %% 40, 1 + n %% 12,
       (ARRAY['rspec unit', 'rspec system', 'eslint', 'compile assets', 'deploy review app'])[1 + n %% 5],
       (ARRAY['test', 'test', 'lint', 'build', 'deploy'])[1 + n %% 5],
       n / 5, CASE WHEN status = 'failed' THEN 1 END, version
FROM (
    SELECT n, (ARRAY['canceling', 'running', 'scheduled', 'pending'])[1 + n %% 4] AS status, false AS ended,
           (now() AT TIME ZONE 'UTC') - interval '26 hours' - interval '10 seconds' * n AS began,
           CASE WHEN n %% 4 = 0 AND n <= 4 * %(damaged)s THEN 2147483647 ELSE n %% 6 END AS version
    FROM generate_series(1, 4 * %(stuck)s) AS n
    UNION ALL
    SELECT n, (ARRAY['canceling', 'running', 'scheduled', 'pending'])[1 + n %% 4], false,
           (now() AT TIME ZONE 'UTC') - interval '1 second' * (n %% 600), n %% 6
    FROM generate_series(1, %(at_work)s) AS n
    UNION ALL
    SELECT n, (ARRAY['success', 'success', 'success', 'failed', 'canceled', 'skipped'])[1 + n %% 6], true,
           (now() AT TIME ZONE 'UTC') - interval '30 seconds' * n, n %% 6
    FROM generate_series(1, %(ended)s) AS n
) AS made
"""
_OLD: Final = "(now() AT TIME ZONE 'UTC') - interval '1 hour'"
_COUNT: Final = f"""
SELECT count(*) FILTER (WHERE status = 'canceling' AND updated_at < {_OLD}),
       count(*) FILTER (WHERE status = 'running' AND updated_at < {_OLD}),
       count(*) FILTER (WHERE status = 'scheduled' AND updated_at < {_OLD}),
       count(*) FILTER (WHERE status = 'pending' AND updated_at < {_OLD}),
       count(*) FILTER (WHERE status IN ('canceling', 'running', 'scheduled', 'pending') AND updated_at >= {_OLD}),
       count(*) FILTER (WHERE failure_reason = 3),
       count(*) FILTER (WHERE failure_reason = 7),
       count(*) FILTER (WHERE failure_reason = 12)
FROM ci_builds
"""  # noqa: S608 - of constants
_KINDS: Final = (
    *(f"stuck in {status}" for status in _STATUSES),
    "active",
    "failed: stuck_or_timeout_failure",
    "failed: stale_schedule",
    "failed: data_integrity_failure",
)


def seed(folder: Path) -> str:
    """Fill the table in under a second; return a summary line."""
    fill(STUCK, AT_WORK, ENDED, DAMAGED)
    database.execute_sql("ANALYZE ci_builds")
    return (
        f"{4 * STUCK + AT_WORK + ENDED:,} CI builds: {STUCK:,} each stuck in {', '.join(_STATUSES)}, "
        f"{AT_WORK:,} active, {ENDED:,} ended; {DAMAGED} of the canceling ones are damaged and cannot be dropped"
    )


def fill(stuck: int, at_work: int, ended: int, damaged: int = 0) -> None:
    """Add builds of each kind to the table in one transaction; `stuck` is the number for each of the four statuses."""
    with database.atomic():
        numbers = {"stuck": stuck, "at_work": at_work, "ended": ended, "damaged": damaged}
        database.execute_sql(_SEED.format(table=quoted_name(Build)), numbers)


def counted() -> dict[str, int]:
    """Return the number of builds of each kind."""
    return dict(zip(_KINDS, database.execute_sql(_COUNT).fetchone(), strict=True))
