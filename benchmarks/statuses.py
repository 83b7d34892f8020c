"""``user_status_cleanup.batch`` beside one statement a batch."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection

from benchmarks.comparison import BY_ROW, FLOOR, OURS, Comparison, Contestant, Place, Target
from benchmarks.ours import composed, ours
from housekeeping.workers.user_status_cleanup.models import UserStatus

WORKER: Final = "user_status_cleanup.batch"
_FILL: Final = """
INSERT INTO user_statuses (user_id, emoji, message, clear_status_at)
SELECT n, 'palm_tree', 'On holiday until the ' || n %% 28,
       CASE
         WHEN n * %(rows)s / %(among)s > (n - 1) * %(rows)s / %(among)s THEN now() - interval '2 days' * random()
         WHEN n %% 2 = 0 THEN now() + interval '1 day' + interval '30 days' * random()
       END
FROM generate_series(1::bigint, %(among)s) AS n
"""
UNDONE: Final = "SELECT count(*) FROM user_statuses WHERE clear_status_at <= now()"
#: Keyset pagination that skips locked rows, as any cleaner beside other writers needs.
_BATCH: Final = """
WITH picked AS MATERIALIZED (
    SELECT clear_status_at, user_id FROM user_statuses
    WHERE clear_status_at <= %(now)s {after}
    ORDER BY clear_status_at, user_id LIMIT %(batch)s FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM user_statuses WHERE user_id = ANY(ARRAY(SELECT user_id FROM picked))
)
SELECT clear_status_at, user_id, count(*) OVER () FROM picked ORDER BY 1 DESC, 2 DESC LIMIT 1
"""
_AFTER: Final = "AND (clear_status_at, user_id) > (%(at)s, %(id)s)"
#: By ctid, without looking up the key again. Only for a plain table; a row that another session has
#: just changed is left out. This is not the same work, but a lower bound.
_BY_PLACE: Final = _BATCH.replace(
    "SELECT clear_status_at, user_id FROM", "SELECT ctid, clear_status_at, user_id FROM"
).replace("user_id = ANY(ARRAY(SELECT user_id FROM picked))", "ctid = ANY(ARRAY(SELECT ctid FROM picked))")
_FLOOR_BY_PLACE: Final = "floor, by ctid"
_BY_ROW: Final = 2_000  # records are enough to measure its rate


def comparison(batch: int, at_least: float) -> Comparison:
    """Return the comparison for this batch size."""
    return Comparison(
        name=f"statuses-{batch}",
        template="statuses",
        models=(UserStatus,),
        fill=fill,
        undone=UNDONE,
        contestants={
            FLOOR: _floor(batch, _BATCH),
            OURS: ours(WORKER, batch_size=batch),
            _FLOOR_BY_PLACE: _floor(batch, _BY_PLACE),
            BY_ROW: _by_row,
        },
        targets=(Target(OURS, FLOOR, at_least),),
    )


def fill(connection: Connection, rows: int, among: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_FILL, {"rows": rows, "among": among})


def _floor(batch: int, statement: str) -> Contestant:
    first, following = statement.format(after=""), statement.format(after=_AFTER)

    def ready(place: Place) -> Callable[[], object]:
        connection = psycopg2.connect(place.database_url)
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute("SELECT 1")

        def work() -> None:
            values: dict[str, Any] = {"now": datetime.now(UTC), "batch": batch}
            cursor.execute(first, values)
            row = cursor.fetchone()
            while row is not None and row[2] == batch:
                cursor.execute(following, values | {"at": row[0], "id": row[1]})
                row = cursor.fetchone()

        return work

    return ready


def _by_row(place: Place) -> Callable[[], object]:
    composed(place, WORKER)

    def work() -> None:
        now = datetime.now(UTC)
        due = UserStatus.select().where(UserStatus.clear_status_at <= now).limit(100)
        for _ in range(min(_BY_ROW, place.rows) // 100):
            for status in due.clone():
                status.delete_instance()

    return work


COMPARISONS: Final = (comparison(100, 0.85), comparison(1_000, 0.9))
