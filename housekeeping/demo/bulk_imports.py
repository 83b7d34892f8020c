"""Sample bulk imports: active, ended and stale, with their entities and trackers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database
from housekeeping.workers.bulk_imports.models import BulkImport, BulkImportEntity, BulkImportTracker

TITLE: Final = "BULK IMPORTS"
IMPORTS: Final = 3_000
STUCK: Final = 600
ENTITIES: Final = 5  # of each import
RELATIONS: Final = ("self", "members", "labels", "milestones", "badges", "boards")
#: Entities with a tracker that another session has locked, like a worker that is still running.
HELD: Final = 40

#: The first ones are stale: last changed one to ten days ago. The others changed in the last day or have ended.
_SEED: Final = """
INSERT INTO {imports} (user_id, source_type, status, created_at, updated_at)
SELECT 1 + n %% 40, 0, CASE WHEN n <= %(stuck)s THEN n %% 2 ELSE (ARRAY[1, 2, 2, 2, -1, -2])[1 + n %% 6] END,
       at - interval '3 hours', at
FROM generate_series(1, %(imports)s) AS n, LATERAL (SELECT now() - CASE
    WHEN n <= %(stuck)s THEN interval '25 hours' + interval '9 days' * (n::float / %(stuck)s)
    ELSE interval '20 hours' * (n::float / %(imports)s) END) AS moved (at) ORDER BY n;
INSERT INTO {entities} (bulk_import_id, namespace_id, project_id, source_type, source_full_path,
    destination_name, destination_namespace, status, created_at, updated_at)
SELECT id, CASE WHEN n = 1 THEN id END, CASE WHEN n > 1 THEN id * 10 + n END, least(n - 1, 1),
       'acme/team-' || id || CASE WHEN n > 1 THEN '/project-' || n ELSE '' END, 'team-' || id, 'moved', status,
       created_at, updated_at
FROM {imports}, generate_series(1, %(entities)s) AS n ORDER BY id, n;
INSERT INTO {trackers} (bulk_import_entity_id, relation, stage, status, created_at, updated_at)
SELECT e.id, relation, stage - 1, CASE WHEN e.status = -2 THEN -3 WHEN e.status NOT IN (0, 1) THEN e.status
       WHEN stage <= e.id %% 6 THEN 2 WHEN stage = e.id %% 6 + 1 THEN 1 ELSE (e.id + stage) %% 2 * 3 END,
       e.created_at, e.updated_at
FROM {entities} AS e, unnest(%(relations)s) WITH ORDINALITY AS of (relation, stage);
"""
#: Locks a tracker of some stale entities, like a session that is working on it.
LOCK: Final = f"""
SELECT id FROM bulk_import_trackers WHERE status = 1 AND bulk_import_entity_id IN (
    SELECT id FROM bulk_import_entities WHERE status IN (0, 1) AND updated_at < now() - interval '24 hours'
    ORDER BY id LIMIT {HELD}
) FOR UPDATE
"""  # noqa: S608 - of constants
_COUNT: Final = """
SELECT (SELECT count(*) FROM bulk_imports WHERE status IN (0, 1) AND updated_at < now() - interval '24 hours'),
       (SELECT count(*) FROM bulk_imports WHERE status = 3),
       (SELECT count(*) FROM bulk_import_entities WHERE status IN (0, 1) AND updated_at < now() - interval '24 hours'),
       (SELECT count(*) FROM bulk_import_entities WHERE status = 3),
       (SELECT count(*) FROM bulk_import_trackers WHERE status IN (0, 1, 3)),
       (SELECT count(*) FROM bulk_import_trackers WHERE status = 4)
"""


def seed(folder: Path) -> str:
    """Fill the three tables in about a second; return a summary line."""
    fill(IMPORTS, STUCK, ENTITIES, RELATIONS)
    database.execute_sql("ANALYZE bulk_imports; ANALYZE bulk_import_entities; ANALYZE bulk_import_trackers")
    entities = IMPORTS * ENTITIES
    return (
        f"{IMPORTS:,} bulk imports with {entities:,} entities and {entities * len(RELATIONS):,} trackers: "
        f"{STUCK:,} imports and their entities are stale; {HELD} of these have a tracker locked by another session"
    )


def fill(imports: int, stuck: int, entities: int, relations: Sequence[str]) -> None:
    """Add imports to the empty tables in one transaction, each with entities, and each of these with its trackers."""
    models = (("imports", BulkImport), ("entities", BulkImportEntity), ("trackers", BulkImportTracker))
    given = {"imports": imports, "stuck": stuck, "entities": entities, "relations": list(relations)}
    with database.atomic():
        database.execute_sql(_SEED.format(**{name: quoted_name(model) for name, model in models}), given)


def counted() -> dict[str, int]:
    """Return the number of rows of each kind."""
    names = (
        *("imports stale", "imports timed out"),
        *(f"entities stale ({HELD} locked by another session)", "entities timed out"),
        *("trackers open (with those of fresh imports)", "trackers timed out"),
    )
    return dict(zip(names, database.execute_sql(_COUNT).fetchone(), strict=True))
