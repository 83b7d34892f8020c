"""Sample rows for a trial of the built-in workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from peewee import Model

from housekeeping.core.errors import WrongArgument
from housekeeping.core.settings import Settings
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database
from housekeeping.engine.registry import Family
from housekeeping.workers import families
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from housekeeping.workers.bulk_imports.models import BulkImport, BulkImportEntity, BulkImportTracker
from housekeeping.workers.ci_stuck_builds.models import Build
from housekeeping.workers.user_status_cleanup.models import UserStatus

#: Due over the last two days. Later ones become due from now on, one after another.
_USER_STATUSES: Final = """
INSERT INTO {table} (user_id, emoji, message, clear_status_at)
SELECT n,
       (ARRAY['palm_tree', 'calendar', 'coffee', 'house', 'face_with_thermometer'])[1 + n %% 5],
       (ARRAY['On holiday', 'In a meeting', 'Back soon', 'Working from home', 'Off sick'])[1 + n %% 5],
       CASE
         WHEN n <= %(due)s THEN now() - interval '2 days' * (n::float / %(due)s)
         WHEN n <= %(due)s + %(later)s THEN now() + %(every)s::interval * (n - %(due)s)
       END
FROM generate_series(1, %(due)s + %(later)s + %(never)s) AS n
"""
#: The first ones are stale: last changed one to ten days ago. The others changed in the last day or have ended.
_IMPORTS: Final = """
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
_REF_DELETIONS: Final = """
INSERT INTO {table} (project_id, ref)
SELECT project_id, ref FROM generate_series(1, %(projects)s) AS project_id, unnest(%(refs)s::text[]) AS ref
"""
_BUILDS: Final = """
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


def add_user_statuses(due: int, later: int, never: int, *, every: str) -> None:
    """Add statuses of each kind to the empty table in one transaction.

    Parameters:
      every: Interval at which the later ones become due, in SQL.
    """
    with database.atomic():
        query = _USER_STATUSES.format(table=quoted_name(UserStatus))
        database.execute_sql(query, {"due": due, "later": later, "never": never, "every": every})


def add_imports(imports: int, stuck: int, entities: int, relations: Sequence[str]) -> None:
    """Add imports to the empty tables in one transaction, each with entities, and each of these with its trackers."""
    models = (("imports", BulkImport), ("entities", BulkImportEntity), ("trackers", BulkImportTracker))
    given = {"imports": imports, "stuck": stuck, "entities": entities, "relations": list(relations)}
    with database.atomic():
        database.execute_sql(_IMPORTS.format(**{name: quoted_name(model) for name, model in models}), given)


def add_ref_deletions(projects: int, refs: Sequence[str]) -> None:
    """Add the refs of each project to the table."""
    database.execute_sql(_REF_DELETIONS.format(table=quoted_name(Deletion)), {"projects": projects, "refs": list(refs)})


def add_builds(stuck: int, at_work: int, ended: int, damaged: int = 0) -> None:
    """Add builds of each kind to the table in one transaction; `stuck` is the number for each of the four statuses."""
    with database.atomic():
        numbers = {"stuck": stuck, "at_work": at_work, "ended": ended, "damaged": damaged}
        database.execute_sql(_BUILDS.format(table=quoted_name(Build)), numbers)


def add_sample_rows(settings: Settings, found: Iterable[Family] | None = None) -> dict[str, int]:
    """Add rows to the empty tables of the built-in families in one transaction, and return their number by table.

    Parameters:
      found: Families whose tables are in the current database; by default all.

    Git refs are left out if the settings have no folder with repositories.

    Raises:
      WrongArgument: One of the tables has rows; nothing is changed.
    """
    # About 300 rows in each of a family's larger tables, a third of them or more stale.
    filled_by: dict[str, Callable[[], None]] = {
        "user_status_cleanup": partial(add_user_statuses, 200, 75, 25, every="1 minute"),
        "bulk_imports": partial(add_imports, 100, 20, 3, ["members"]),
        "batched_git_ref_updates": partial(
            add_ref_deletions, 10, [f"refs/heads/fix-{number:03}" for number in range(30)]
        ),
        "ci_stuck_builds": partial(add_builds, 25, 50, 150),
    }
    active = {family.name: family for family in (families(settings) if found is None else found)}
    filling = {name: fill for name, fill in filled_by.items() if name in active}
    if settings.repositories_root is None:
        filling.pop("batched_git_ref_updates", None)
    models = [model for name, family in active.items() if name in filling for model in family.models.values()]
    with database.atomic():
        for model in models:
            if model.select().limit(1).exists():
                raise WrongArgument(
                    f"table {_name(model)} already has rows; sample data is only for empty tables, and none was added"
                )
        for fill in filling.values():
            fill()
    return {_name(model): model.select().count() for model in models}


def _name(model: type[Model]) -> str:
    meta: Any = model._meta
    return str(meta.table_name)
