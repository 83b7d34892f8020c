"""``batched_git_ref_updates.cleanup_scheduler`` beside a loose index scan and pipelined enqueueing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from uuid import uuid4

import dramatiq
import psycopg2
import redis
from dramatiq.brokers.redis import RedisBroker
from psycopg2.extensions import connection as Connection

from benchmarks.comparison import BY_ROW, FLOOR, OURS, Comparison, Place, Target
from benchmarks.ours import composed, ours
from housekeeping.workers.batched_git_ref_updates.models import Deletion, DeletionStatus

_WORKER: Final = "batched_git_ref_updates.cleanup_scheduler"
_CHILD: Final = "batched_git_ref_updates.project_cleanup"
_BATCH_SIZE: Final = 100
_QUEUE: Final = "git_refs"
_BY_ROW: Final = 2_000  # projects are enough to measure its rate
_FILL: Final = """
INSERT INTO batched_git_ref_updates_deletions (project_id, ref, status)
SELECT n %% (%(rows)s * 2), 'refs/heads/fix-' || n, CASE WHEN n %% (%(rows)s * 2) < %(rows)s THEN 1 ELSE 2 END
FROM generate_series(1, %(among)s) AS n
"""
#: Loose index scan from each project to the next.
_PROJECTS: Final = """
WITH RECURSIVE pending (project_id) AS (
    (SELECT project_id FROM batched_git_ref_updates_deletions WHERE status = 1 AND project_id > %s
     ORDER BY project_id LIMIT 1)
    UNION ALL
    SELECT following.project_id FROM pending, LATERAL (
        SELECT project_id FROM batched_git_ref_updates_deletions
        WHERE status = 1 AND project_id > pending.project_id ORDER BY project_id LIMIT 1
    ) AS following
)
SELECT project_id FROM pending LIMIT %s
"""


def fill(connection: Connection, rows: int, among: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_FILL, {"rows": rows, "among": among})


def _undone(place: Place) -> int:
    client: Any = redis.Redis.from_url(place.redis_url)
    # A message is delivered only if both the list and the hash have it.
    queued = min(client.llen(f"housekeeping:broker:{_QUEUE}"), client.hlen(f"housekeeping:broker:{_QUEUE}.msgs"))
    client.close()
    return place.rows - int(queued)


def _floor(place: Place) -> Callable[[], object]:
    connection = psycopg2.connect(place.database_url)
    connection.autocommit = True
    cursor = connection.cursor()
    cursor.execute("SELECT 1")
    client: Any = redis.Redis.from_url(place.redis_url)
    client.ping()
    queue = f"housekeeping:broker:{_QUEUE}"

    def work() -> None:
        last = -1
        while True:
            cursor.execute(_PROJECTS, (last, _BATCH_SIZE))
            projects = [project for (project,) in cursor.fetchall()]
            if projects:
                messages = {}
                for project in projects:
                    at = str(uuid4())
                    message: Any = dramatiq.Message(_QUEUE, _CHILD, (project,), {}, {"redis_message_id": at})
                    messages[at] = message.encode()
                pipeline = client.pipeline(transaction=True)
                pipeline.hset(f"{queue}.msgs", mapping=messages)
                pipeline.rpush(queue, *messages)
                pipeline.execute()
                last = projects[-1]
            if len(projects) < _BATCH_SIZE:
                return

    return work


def _by_row(place: Place) -> Callable[[], object]:
    composed(place, _WORKER)
    broker = RedisBroker(url=place.redis_url, namespace="housekeeping:broker")
    actor: Any = dramatiq.actor(broker=broker, actor_name=_CHILD, queue_name=_QUEUE)(lambda project: None)

    def work() -> None:
        pending = Deletion.select(Deletion.project_id).where(Deletion.status == DeletionStatus.pending).distinct()
        for row in pending.order_by(Deletion.project_id).limit(min(_BY_ROW, place.rows)):
            actor.send(row.project_id)

    return work


COMPARISONS: Final = (
    Comparison(
        name="projects",
        unit="projects",
        template="projects",
        models=(Deletion,),
        fill=fill,
        undone=_undone,
        rows=10_000,
        among=400_000,
        contestants={FLOOR: _floor, OURS: ours(_WORKER), BY_ROW: _by_row},
        targets=(Target(OURS, FLOOR, 0.7),),
    ),
)
