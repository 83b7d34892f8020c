"""``ci.stuck_builds.drop_canceling`` beside one compare-and-set for 100 builds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection
from transitions import Machine

from benchmarks.comparison import BY_ROW, FLOOR, LINES, OURS, Comparison, Place, Target
from benchmarks.ours import composed, ours
from housekeeping.workers.ci_stuck_builds.models import Build, BuildStatus, FailureReason

_WORKER: Final = "ci.stuck_builds.drop_canceling"
_BATCH_SIZE: Final = 100
_BY_ROW: Final = 2_000  # records are enough to measure its rate
_FILL: Final = """
INSERT INTO ci_builds (type, status, created_at, updated_at, finished_at, project_id, runner_id, name, stage,
    commit_id, lock_version)
SELECT 'Ci::Build', CASE WHEN stale THEN 'canceling' ELSE (ARRAY['success', 'failed', 'canceled'])[1 + n %% 3] END,
       at, at, CASE WHEN NOT stale THEN at END, 1 + n %% 400, 1 + n %% 12, 'rspec unit', 'test', n / 5, n %% 4
FROM generate_series(1::bigint, %(among)s) AS n,
LATERAL (SELECT n * %(rows)s / %(among)s > (n - 1) * %(rows)s / %(among)s) AS one (stale),
LATERAL (SELECT (now() AT TIME ZONE 'UTC') - interval '3 hours' - interval '3 days' * random()) AS began (at)
"""
_UNDONE: Final = "SELECT count(*) FROM ci_builds WHERE type = 'Ci::Build' AND status = 'canceling'"
#: Compare-and-set: status and version as they were picked.
_BATCH: Final = """
WITH picked AS MATERIALIZED (
    SELECT created_at, project_id, id, lock_version FROM ci_builds
    WHERE type = 'Ci::Build' AND status = 'canceling' AND created_at < %(before)s AND updated_at < %(before)s {after}
    ORDER BY created_at, project_id, id LIMIT %(batch)s FOR UPDATE SKIP LOCKED
), dropped AS (
    UPDATE ci_builds SET status = 'failed', failure_reason = 3, finished_at = %(now)s, updated_at = %(now)s,
        lock_version = ci_builds.lock_version + 1
    FROM picked WHERE ci_builds.id = picked.id AND ci_builds.lock_version = picked.lock_version
)
SELECT created_at, project_id, id, count(*) OVER () FROM picked ORDER BY 1 DESC, 2 DESC, 3 DESC LIMIT 1
"""
_FIRST: Final = _BATCH.format(after="")
#: Not a row comparison: PostgreSQL underestimates its matches and then sorts all remaining rows.
_AFTER: Final = """
AND created_at >= %(at)s AND (created_at > %(at)s
    OR created_at = %(at)s AND (project_id > %(project)s OR project_id = %(project)s AND id > %(id)s))
"""
_NEXT: Final = _BATCH.format(after=_AFTER)


def fill(connection: Connection, rows: int, among: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_FILL, {"rows": rows, "among": among})


def _floor(place: Place) -> Callable[[], object]:
    connection = psycopg2.connect(place.database_url)
    connection.autocommit = True
    cursor = connection.cursor()
    cursor.execute("SELECT 1")

    def work() -> None:
        now = datetime.now(UTC).replace(tzinfo=None)
        values: dict[str, Any] = {"now": now, "before": now - timedelta(hours=1), "batch": _BATCH_SIZE}
        cursor.execute(_FIRST, values)
        row = cursor.fetchone()
        while row is not None and row[3] == _BATCH_SIZE:
            cursor.execute(_NEXT, values | {"at": row[0], "project": row[1], "id": row[2]})
            row = cursor.fetchone()

    return work


class _Stateful:
    """Build with a state machine per row, as in an ordinary application."""

    def __init__(self, build: Build) -> None:
        self.build = build
        ends = (BuildStatus.SUCCESS, BuildStatus.FAILED, BuildStatus.CANCELED, BuildStatus.SKIPPED)
        sources: list[Any] = [status for status in BuildStatus if status not in ends]
        initial = BuildStatus(build.status)
        self.machine = Machine(self, states=BuildStatus, initial=initial, auto_transitions=False)
        self.machine.add_transition("drop", sources, BuildStatus.FAILED, after="save")

    def save(self) -> None:
        """Save the new state if the version is unchanged."""
        now = datetime.now(UTC)
        version = self.build.lock_version or 0
        Build.update(
            status=BuildStatus.FAILED.value,
            failure_reason=FailureReason.STUCK_OR_TIMEOUT_FAILURE,
            finished_at=now,
            updated_at=now,
            lock_version=version + 1,
        ).where((Build.id == self.build.id) & (Build.lock_version == version)).execute()


def _by_row(place: Place) -> Callable[[], object]:
    composed(place, _WORKER)

    def work() -> None:
        before = datetime.now(UTC) - timedelta(hours=1)
        stuck = Build.select().where(
            Build.in_status(BuildStatus.CANCELING), Build.created_at < before, Build.updated_at < before
        )
        for build in stuck.order_by(Build.created_at, Build.project_id, Build.id).limit(min(_BY_ROW, place.rows)):
            _Stateful(build).drop()  # type: ignore[attr-defined]

    return work


COMPARISONS: Final = (
    Comparison(
        name="builds",
        unit="builds",
        template="builds",
        models=(Build,),
        fill=fill,
        undone=_UNDONE,
        contestants={
            FLOOR: _floor,
            OURS: ours(_WORKER, log_records=False),
            LINES: ours(_WORKER, lines=True),
            BY_ROW: _by_row,
        },
        targets=(Target(OURS, FLOOR, 0.8), Target(LINES, FLOOR, 0.5), Target(OURS, BY_ROW, 10)),
    ),
)
