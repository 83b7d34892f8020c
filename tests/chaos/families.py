"""Test data of the five workers: stale records, the expected final state, and the counts of the changes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import redis
from peewee import Model
from psycopg2.extensions import connection as Connection

from tests.integration.workers.batched_git_ref_updates.repositories import made
from tests.internals.workers import builds_worker as ci_stuck_builds
from tests.internals.workers import git_worker as git_refs
from tests.internals.workers import hashed_path, pending_entry
from tests.internals.workers import imports_worker as bulk_imports
from tests.internals.workers import status_worker as user_status_cleanup

STALE: Final = 35  # three full batches of ten and a partial one
FRESH: Final = 6
#: Distance between the first ids of two rounds.
SPAN: Final = 1000

_STATUSES: Final = """
INSERT INTO user_statuses (user_id, clear_status_at)
SELECT {base} + n, now() - n * interval '1 minute' FROM generate_series(1, {stale}) AS n
UNION ALL SELECT {base} + 500 + n, now() + interval '1 day' FROM generate_series(1, {fresh}) AS n
"""
_IMPORTS: Final = """
INSERT INTO bulk_imports (id, user_id, status, updated_at)
SELECT {base} + n, 1, n % 2, now() - interval '25 hours' - n * interval '1 minute' FROM generate_series(1, {stale}) AS n
UNION ALL SELECT {base} + 500 + n, 1, 1, now() FROM generate_series(1, {fresh}) AS n;
INSERT INTO bulk_import_entities
    (id, bulk_import_id, namespace_id, source_type, source_full_path, status, updated_at)
SELECT {base} + n, {base} + 501, 1, 0, 'g/' || n, n % 2, now() - interval '25 hours' - n * interval '1 minute'
FROM generate_series(1, {stale}) AS n
UNION ALL SELECT {base} + 500 + n, {base} + 501, 1, 0, 'g/f' || n, 1, now() FROM generate_series(1, {fresh}) AS n;
INSERT INTO bulk_import_trackers (id, bulk_import_entity_id, relation, status)
SELECT {base} + n, {base} + n, 'members', 3 FROM generate_series(1, {stale}) AS n
UNION ALL SELECT {base} + 500 + n, {base} + n, 'badges', 2 FROM generate_series(1, {fresh}) AS n
"""
_BUILDS: Final = """
INSERT INTO ci_builds (id, type, status, created_at, updated_at, project_id, name, stage, commit_id)
SELECT {base} + n, 'Ci::Build', 'canceling', (now() AT TIME ZONE 'UTC') - interval '2 hours' - n * interval '1 minute',
       (now() AT TIME ZONE 'UTC') - interval '2 hours', nullif(n % 7, 0), 'rspec', 'test', n
FROM generate_series(1, {stale}) AS n
UNION ALL SELECT {base} + 500 + n, 'Ci::Build', 'canceling', now() AT TIME ZONE 'UTC', now() AT TIME ZONE 'UTC',
       1, 'rspec', 'test', n
FROM generate_series(1, {fresh}) AS n
"""
_DELETIONS: Final = """
INSERT INTO batched_git_ref_updates_deletions (id, project_id, ref)
SELECT {base} + n, {base}, CASE WHEN n = 17 THEN 'no ref at all' ELSE 'refs/heads/old-' || n END
FROM generate_series(1, {stale}) AS n
"""
#: Refs with a row that are not in the repository, as if already deleted.
_NEVER_THERE: Final = range(30, STALE + 1)

#: Final state of a round, with ids relative to its first one and without times.
State = list[tuple[Any, ...]]


@dataclass(slots=True)
class Place:
    """Servers, schema and folders of a trial.

    Attributes:
      connection: On the application's schema.
      folder: With ``objects`` and ``repositories``.
    """

    connection: Connection
    redis_client: redis.Redis
    folder: Path

    def rows(self, query: str, *values: object) -> State:
        """Return the rows of a query."""
        with self.connection.cursor() as cursor:
            cursor.execute(query, values or None)
            return [tuple(row) for row in cursor.fetchall()]

    def do(self, statement: str) -> None:
        """Execute a statement."""
        with self.connection.cursor() as cursor:
            cursor.execute(statement)


@dataclass(frozen=True)
class Family:
    """Worker whose records are rows.

    Attributes:
      actor: Its name.
      models: Its tables.
      statement: Makes a round's rows.
      queries: Find what is left of them.
      counts: Table -> the counts of a run that number its changed rows; keys at several depths are joined by commas.
      stale: Records of a round that are processed.
      settings: In ``HOUSEKEEPING_WORKERS``.
      setup: Statements that create its tables, if it has no models.
      archive: Table whose rows move to another one, and that one.
      partitions: Table whose partitions are dropped; the number of each is counted as a change of this table.
      is_worker: Whether a message starts it.
    """

    actor: str
    models: Sequence[type[Model]]
    statement: str = ""
    queries: Sequence[str] = ()
    counts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    leased: bool = False
    setup: str = ""
    archive: tuple[str, str] | None = None
    partitions: str | None = None
    is_worker: bool = True
    stale: int = STALE

    @property
    def tables(self) -> list[str]:
        """Names of the tables whose rows it changes."""
        others = [table for table in {*self.counts, *(self.archive or ())} if table != self.partitions]
        return list(dict.fromkeys([*(model._meta.table_name for model in self.models), *sorted(others)]))

    def counted(self) -> Iterator[tuple[str, str, Sequence[str]]]:
        """Yield each worker and table with the counts that number the rows it changes."""
        for table, names in self.counts.items():
            yield self.actor, table, names
        if self.archive is not None:
            yield f"restore:{self.actor}", self.archive[1], ("restored",)

    def arguments(self, round: int) -> tuple[int, ...]:
        """Return the arguments of the actor for a round."""
        return ()

    def fill(self, place: Place, round: int) -> None:
        """Create stale records of a round, and others that must stay."""
        place.do(self.statement.format(base=round * SPAN, stale=STALE, fresh=FRESH))

    def complaints(self, place: Place) -> Iterator[str]:
        """Yield what else is wrong with the records, or with the committed changes."""
        return iter(())

    def left(self, place: Place, round: int) -> State:
        """Return the current records of the round."""
        base = round * SPAN
        return [row for query in self.queries for row in place.rows(query, base, base, base + SPAN - 1)]


class Uploads(Family):
    """Upload worker with entries in Redis and objects in a folder."""

    def fill(self, place: Place, round: int) -> None:
        folder = place.folder / "objects" / str(round)
        folder.mkdir(parents=True)
        now = int(time.time())
        ages = {**{f"s{n}": 20_000 for n in range(self.stale)}, **{f"f{n}": 60 for n in range(FRESH)}}
        for name, age in ages.items():
            # Long, so that Redis stores even a small hash in an encoding that HSCAN pages through.
            path = f"{round}/{name}-{'x' * 80}"
            (place.folder / "objects" / path).touch()
            place.redis_client.hset(pending_entry.KEY, f"artifacts:{path}", now - age)

    def left(self, place: Place, round: int) -> State:
        fields: Any = place.redis_client.hkeys(pending_entry.KEY)
        start = f"artifacts:{round}/"
        known = [name.decode().removeprefix(start) for name in fields if name.decode().startswith(start)]
        objects = [path.name for path in (place.folder / "objects" / str(round)).iterdir()]
        return [*(("entry", name) for name in sorted(known)), *(("object", name) for name in sorted(objects))]


class Refs(Family):
    """Ref worker with rows in PostgreSQL and refs in a real repository, one project per round."""

    def arguments(self, round: int) -> tuple[int, ...]:
        return (round * SPAN,)

    def fill(self, place: Place, round: int) -> None:
        super().fill(place, round)
        old = [f"refs/heads/old-{n}" for n in range(1, STALE + 1) if n != 17 and n not in _NEVER_THERE]
        made(place.folder / "repositories", round * SPAN, *old, *(f"refs/heads/kept-{n}" for n in range(FRESH)))

    def left(self, place: Place, round: int) -> State:
        refs = (place.folder / "repositories" / hashed_path(round * SPAN)).glob("refs/heads/*")
        return super().left(place, round) + [("ref", name) for name in sorted(ref.name for ref in refs)]


STATUSES: Final = Family(
    "user_status_cleanup.batch",
    list(user_status_cleanup.MODELS.values()),
    _STATUSES,
    ["SELECT user_id - %s AS n FROM user_statuses WHERE user_id BETWEEN %s AND %s ORDER BY 1"],
    {"user_statuses": ("deleted_rows",)},
    {"batch_size": 10},
)
IMPORTS: Final = Family(
    "bulk_imports.stale_import",
    list(bulk_imports.MODELS.values()),
    _IMPORTS,
    [
        f"SELECT '{table}', id - %s AS n, status FROM {table} WHERE id BETWEEN %s AND %s ORDER BY 2"
        for table in bulk_imports.MODELS
    ],
    {
        "bulk_imports": ("timed_out_imports",),
        "bulk_import_entities": ("timed_out_entities",),
        "bulk_import_trackers": ("timed_out_trackers",),
    },
    {"batch_size": 10, "page_size": 10, "log_records": False},
)
#: More than other records: a batch reads whole pages, and 35 entries were sometimes processed by two batches.
UPLOADS: Final = Uploads("object_storage.delete_stale_direct_uploads", [], settings={"batch_size": 10}, stale=100)
REFS: Final = Refs(
    "batched_git_ref_updates.project_cleanup",
    list(git_refs.MODELS.values()),
    _DELETIONS,
    [
        "SELECT id - %s AS n, ref, status FROM batched_git_ref_updates_deletions "
        "WHERE project_id BETWEEN %s AND %s ORDER BY 1"
    ],
    {"batched_git_ref_updates_deletions": ("total_deletes", "invalid")},
    {"page_size": 10, "git_batch_size": 5},
    leased=True,
)
BUILDS: Final = Family(
    "ci.stuck_builds.drop_canceling",
    list(ci_stuck_builds.MODELS.values()),
    _BUILDS,
    [
        "SELECT id - %s AS n, status, failure_reason, lock_version, finished_at IS NULL FROM ci_builds "
        "WHERE id BETWEEN %s AND %s ORDER BY 1"
    ],
    {"ci_builds": ("dropped", "doomed")},
    {"batch_size": 10, "log_records": False},
    leased=True,
)

FIVE: Final = (STATUSES, IMPORTS, UPLOADS, REFS, BUILDS)
#: Families that need no messages.
THREE: Final = (STATUSES, IMPORTS, BUILDS)
#: Families with all records in PostgreSQL and git, which do not lose uploads with an empty Redis.
FOUR: Final = (STATUSES, IMPORTS, REFS, BUILDS)
