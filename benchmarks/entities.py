"""``bulk_imports.stale_import``, its entities with ten trackers each, beside one statement for 100 entities."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection

from benchmarks.comparison import BY_ROW, FLOOR, LINES, OURS, Comparison, Place, Target
from benchmarks.imports import WORKER, Stateful
from benchmarks.ours import composed, ours
from housekeeping.database.connection import database
from housekeeping.workers.bulk_imports.models import BulkImport, BulkImportEntity, BulkImportTracker
from housekeeping.workers.bulk_imports.states import ImportStatus, TrackerStatus

_BATCH_SIZE: Final = 100
_BY_ROW: Final = 200  # entities are enough to measure its rate
_FILL: Final = """
INSERT INTO bulk_imports (user_id, source_type, status) SELECT n, 0, 2 FROM generate_series(1, 100) AS n;
INSERT INTO bulk_import_entities (bulk_import_id, namespace_id, source_type, source_full_path, destination_name,
    destination_namespace, status, created_at, updated_at)
SELECT 1 + n %% 100, n, 0, 'acme/team-' || n, 'team-' || n, 'moved', CASE WHEN stale THEN n %% 2 ELSE 2 END, at, at
FROM generate_series(1::bigint, %(among)s) AS n,
LATERAL (SELECT n * %(rows)s / %(among)s > (n - 1) * %(rows)s / %(among)s) AS one (stale),
LATERAL (SELECT now() - interval '20 hours' * random()
                - CASE WHEN stale THEN interval '26 hours' ELSE interval '0' END) AS moved (at);
INSERT INTO bulk_import_trackers (bulk_import_entity_id, relation, stage, status, created_at, updated_at)
SELECT id, 'relation-' || n, n, CASE WHEN status = 2 THEN 2 ELSE (ARRAY[0, 1, 3])[1 + n %% 3] END,
       created_at, updated_at
FROM bulk_import_entities, generate_series(1, 10) AS n
"""
_UNDONE: Final = (
    "SELECT count(*) FROM bulk_import_entities e WHERE updated_at < now() - interval '25 hours' "
    "AND (status IN (0, 1) OR EXISTS (SELECT FROM bulk_import_trackers WHERE bulk_import_entity_id = e.id "
    "AND status IN (0, 1, 3)))"
)
#: Entities and trackers change together. Unlike the worker, it does not look for locked trackers.
_BATCH: Final = """
WITH picked AS MATERIALIZED (
    SELECT updated_at, id FROM bulk_import_entities
    WHERE updated_at < %(before)s AND status IN (0, 1) {after}
    ORDER BY updated_at, id LIMIT %(batch)s FOR UPDATE SKIP LOCKED
), moved AS (
    UPDATE bulk_import_entities SET status = 3, updated_at = %(now)s WHERE id = ANY(ARRAY(SELECT id FROM picked))
), followed AS (
    UPDATE bulk_import_trackers SET status = 4, updated_at = %(now)s
    WHERE bulk_import_entity_id = ANY(ARRAY(SELECT id FROM picked)) AND status IN (0, 1, 3)
)
SELECT updated_at, id, count(*) OVER () FROM picked ORDER BY 1 DESC, 2 DESC LIMIT 1
"""
_FIRST: Final = _BATCH.format(after="")
_NEXT: Final = _BATCH.format(after="AND (updated_at, id) > (%(at)s, %(id)s)")


def fill(connection: Connection, rows: int, among: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_FILL, {"rows": rows, "among": among})


def _floor(place: Place) -> Callable[[], object]:
    connection = psycopg2.connect(place.database_url)
    connection.autocommit = True
    cursor = connection.cursor()
    cursor.execute("SELECT 1")

    def work() -> None:
        now = datetime.now(UTC)
        values: dict[str, Any] = {"now": now, "before": now - timedelta(hours=24), "batch": _BATCH_SIZE}
        cursor.execute(_FIRST, values)
        row = cursor.fetchone()
        while row is not None and row[2] == _BATCH_SIZE:
            cursor.execute(_NEXT, values | {"at": row[0], "id": row[1]})
            row = cursor.fetchone()

    return work


def _by_row(place: Place) -> Callable[[], object]:
    composed(place, WORKER)

    def work() -> None:
        before = datetime.now(UTC) - timedelta(hours=24)
        stale = BulkImportEntity.select().where(BulkImportEntity.stale(before)).limit(min(_BY_ROW, place.rows))
        for each in stale:
            with database.atomic():
                Stateful(each, ImportStatus, ImportStatus.TIMEOUT).cleanup_stale()  # type: ignore[attr-defined]
                for tracker in each.trackers:
                    Stateful(tracker, TrackerStatus, TrackerStatus.TIMEOUT).cleanup_stale()  # type: ignore[attr-defined]

    return work


COMPARISONS: Final = (
    Comparison(
        name="entities",
        rounds_at_most=3,
        unit="entities",
        template="entities",
        models=(BulkImport, BulkImportEntity, BulkImportTracker),
        fill=fill,
        undone=_UNDONE,
        rows=20_000,
        among=100_000,
        contestants={
            FLOOR: _floor,
            OURS: ours(WORKER, log_records=False),
            LINES: ours(WORKER, lines=True),
            BY_ROW: _by_row,
        },
        targets=(Target(OURS, FLOOR, 0.8), Target(LINES, FLOOR, 0.5), Target(OURS, BY_ROW, 10)),
    ),
)
