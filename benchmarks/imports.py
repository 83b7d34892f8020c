"""``bulk_imports.stale_import``, its imports, beside one update for 1,000 of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection
from transitions import Machine

from benchmarks.comparison import BY_ROW, FLOOR, LINES, OURS, Comparison, Place, Target
from benchmarks.ours import composed, ours
from housekeeping.workers.bulk_imports.models import BulkImport, BulkImportEntity, BulkImportTracker
from housekeeping.workers.bulk_imports.states import ImportStatus

WORKER: Final = "bulk_imports.stale_import"
_PAGE: Final = 1_000
_BY_ROW: Final = 2_000  # records are enough to measure its rate
_FILL: Final = """
INSERT INTO bulk_imports (user_id, source_type, status, created_at, updated_at)
SELECT n %% 5000, 0, CASE WHEN stale THEN n %% 2 ELSE (ARRAY[0, 1, 2, 2, 2, 3, -1, -2])[1 + n %% 8] END, at, at
FROM generate_series(1::bigint, %(among)s) AS n,
LATERAL (SELECT n * %(rows)s / %(among)s > (n - 1) * %(rows)s / %(among)s) AS one (stale),
LATERAL (SELECT now() - interval '20 hours' * random()
                - CASE WHEN stale THEN interval '26 hours' ELSE interval '0' END) AS moved (at)
"""
_UNDONE: Final = "SELECT count(*) FROM bulk_imports WHERE status IN (0, 1) AND updated_at < now() - interval '25 hours'"
_BATCH: Final = """
WITH picked AS MATERIALIZED (
    SELECT updated_at, id FROM bulk_imports
    WHERE updated_at < %(before)s AND status IN (0, 1) {after}
    ORDER BY updated_at, id LIMIT %(page)s FOR UPDATE SKIP LOCKED
), moved AS (
    UPDATE bulk_imports SET status = 3, updated_at = %(now)s WHERE id = ANY(ARRAY(SELECT id FROM picked))
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
        values: dict[str, Any] = {"now": now, "before": now - timedelta(hours=24), "page": _PAGE}
        cursor.execute(_FIRST, values)
        row = cursor.fetchone()
        while row is not None and row[2] == _PAGE:
            cursor.execute(_NEXT, values | {"at": row[0], "id": row[1]})
            row = cursor.fetchone()

    return work


class Stateful:
    """Row with a state machine per instance, as in an ordinary application."""

    def __init__(self, row: Any, states: type[Any], end: Any) -> None:
        self.row = row
        sources = [each for each in states if each.name in ("CREATED", "STARTED", "ENQUEUED")]
        self.machine = Machine(self, states=states, initial=states(row.status), auto_transitions=False)
        self.machine.add_transition("cleanup_stale", sources, end, after="save")

    def save(self) -> None:
        """Save the new state."""
        self.row.status = self.state  # type: ignore[attr-defined]
        self.row.updated_at = datetime.now(UTC)
        self.row.save()


def _by_row(place: Place) -> Callable[[], object]:
    composed(place, WORKER)

    def work() -> None:
        before = datetime.now(UTC) - timedelta(hours=24)
        stale = BulkImport.select().where(BulkImport.stale(before)).limit(min(_BY_ROW, place.rows))
        for each in stale:
            Stateful(each, ImportStatus, ImportStatus.TIMEOUT).cleanup_stale()  # type: ignore[attr-defined]

    return work


COMPARISONS: Final = (
    Comparison(
        name="imports",
        unit="imports",
        template="imports",
        models=(BulkImport, BulkImportEntity, BulkImportTracker),
        fill=fill,
        undone=_UNDONE,
        contestants={
            FLOOR: _floor,
            OURS: ours(WORKER, log_records=False),
            LINES: ours(WORKER, lines=True),
            BY_ROW: _by_row,
        },
        targets=(Target(OURS, FLOOR, 0.8), Target(LINES, FLOOR, 0.5), Target(OURS, BY_ROW, 10)),
    ),
)
