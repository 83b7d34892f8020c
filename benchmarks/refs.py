"""``batched_git_ref_updates``: projects that are enqueued, and the refs of one project that git deletes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import dramatiq
import psycopg2
import redis
from psycopg2.extensions import connection as Connection

from benchmarks.comparison import FLOOR, LINES, OURS, Comparison, Place
from benchmarks.contestants import composed, ours, run
from housekeeping import log_rows
from housekeeping.core import events
from housekeeping.workers.batched_git_ref_updates.git import hashed_path
from housekeeping.workers.batched_git_ref_updates.models import Deletion

_SCHEDULER: Final = "batched_git_ref_updates.cleanup_scheduler"
_CLEANUP: Final = "batched_git_ref_updates.project_cleanup"
_BATCH: Final = 100
_PAGE: Final = 1_000
_QUEUE: Final = "housekeeping:broker:git_refs"
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


def _fill_projects(connection: Connection, rows: int, among: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO batched_git_ref_updates_deletions (project_id, ref, status) "
            "SELECT n %% (%(rows)s * 2), 'refs/heads/fix-' || n, "
            "CASE WHEN n %% (%(rows)s * 2) < %(rows)s THEN 1 ELSE 2 END FROM generate_series(1, %(among)s) AS n",
            {"rows": rows, "among": among},
        )


def _unqueued(place: Place) -> int:
    client: Any = redis.Redis.from_url(place.redis_url)
    # A message is delivered only if both the list and the hash have it.
    queued = min(client.llen(_QUEUE), client.hlen(f"{_QUEUE}.msgs"))
    client.close()
    return place.rows - int(queued)


def _cursor(place: Place) -> Any:
    connection = psycopg2.connect(place.database_url)
    connection.autocommit = True
    cursor = connection.cursor()
    cursor.execute("SELECT 1")
    return cursor


def _enqueueing_floor(place: Place) -> Callable[[], object]:
    cursor = _cursor(place)
    client: Any = redis.Redis.from_url(place.redis_url)
    client.ping()

    def work() -> None:
        projects = [-1]
        while len(projects) == _BATCH or projects == [-1]:
            cursor.execute(_PROJECTS, (projects[-1], _BATCH))
            projects = [project for (project,) in cursor.fetchall()]
            messages = {}
            for project in projects:
                at = str(uuid4())
                options = {"redis_message_id": at}
                message: Any = dramatiq.Message("git_refs", _CLEANUP, (project,), {}, options)
                messages[at] = message.encode()
            if messages:
                pipeline = client.pipeline(transaction=True)
                pipeline.hset(f"{_QUEUE}.msgs", mapping=messages)
                pipeline.rpush(_QUEUE, *messages)
                pipeline.execute()

    return work


def _fill_refs(connection: Connection, rows: int, among: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO batched_git_ref_updates_deletions (project_id, ref, status) "
            "SELECT CASE WHEN n <= %(rows)s THEN 1 ELSE 2 END, 'refs/heads/fix-' || n, "
            "CASE WHEN n <= %(rows)s THEN 1 ELSE 2 END FROM generate_series(1, %(among)s) AS n",
            {"rows": rows, "among": among},
        )


def _repository(place: Place) -> Path:
    return place.folder / hashed_path(1)


def _git(repository: Path, *arguments: str, given: str = "") -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, input=given, text=True, check=True, capture_output=True).stdout.strip()


def _make_repository(place: Place) -> None:
    repository = _repository(place)
    repository.mkdir(parents=True)
    _git(repository, "init", "--bare", "-q")
    tree = _git(repository, "hash-object", "-t", "tree", "-w", "--stdin")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    commit = _git(repository, *author, "commit-tree", tree, "-m", "first")
    refs = "".join(f"create refs/heads/fix-{number} {commit}\n" for number in range(1, place.rows + 1))
    _git(repository, "update-ref", "--stdin", given=refs)


def _deleting_floor(place: Place) -> Callable[[], object]:
    cursor, repository = _cursor(place), _repository(place)

    def work() -> None:
        last, size = 0, _PAGE
        while size == _PAGE:
            cursor.execute(
                "SELECT id, ref FROM batched_git_ref_updates_deletions "
                "WHERE project_id = 1 AND status = 1 AND id > %s ORDER BY id LIMIT %s",
                (last, _PAGE),
            )
            page = cursor.fetchall()
            for start in range(0, len(page), _BATCH):
                names = "".join(f"delete {ref}\0\0" for _, ref in page[start : start + _BATCH])
                _git(repository, "update-ref", "--no-deref", "-z", "--stdin", given=names)
            cursor.execute(
                "UPDATE batched_git_ref_updates_deletions SET status = 2, updated_at = now() "
                "WHERE project_id = 1 AND status = 1 AND id = ANY(%s)",
                ([id for id, _ in page],),
            )
            last, size = page[-1][0] if page else 0, len(page)

    return work


def _with_lines(place: Place) -> Callable[[], object]:
    """The worker logs no line for a deleted ref, so that a subscriber of its event does."""
    sweep = composed(place, _CLEANUP, lines=True)

    def subscriber(sender: str, rows: Any, **named: Any) -> None:
        log_rows("benchmarks.refs", 20, "Ref deleted", rows)

    events.refs_deleted.connect(subscriber, weak=False)
    return lambda: run(sweep, 1)


COMPARISONS: Final = (
    Comparison(
        name="projects",
        unit="projects",
        template="projects",
        models=(Deletion,),
        fill=_fill_projects,
        undone=_unqueued,
        rows=10_000,
        among=400_000,
        contestants={FLOOR: _enqueueing_floor, OURS: ours(_SCHEDULER)},
        targets={OURS: 0.6},
    ),
    Comparison(
        name="refs",
        unit="refs",
        template="refs",
        models=(Deletion,),
        fill=_fill_refs,
        undone="SELECT count(*) FROM batched_git_ref_updates_deletions WHERE status = 1",
        prepare=_make_repository,
        rows=5_000,
        among=100_000,
        rounds_at_most=3,
        contestants={FLOOR: _deleting_floor, OURS: ours(_CLEANUP, argument=1), LINES: _with_lines},
        targets={OURS: 0.6},
    ),
)
