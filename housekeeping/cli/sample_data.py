"""Sample rows for a trial of the built-in workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from peewee import Model

from housekeeping.core.errors import WrongArgument
from housekeeping.core.settings import Settings
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import database
from housekeeping.sweeps.registry import Family
from housekeeping.workers import families
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from housekeeping.workers.bulk_imports.models import BulkImport, BulkImportEntity, BulkImportTracker
from housekeeping.workers.bulk_imports.states import ImportStatus, SourceType, TrackerStatus
from housekeeping.workers.ci_stuck_builds.models import Build
from housekeeping.workers.user_status_cleanup.models import UserStatus

ROWS: Final = 300  # in each of the larger tables
_IMPORTS: Final = ROWS // 3  # each with three entities, and each of these with a tracker
_MESSAGES: Final = ("On holiday", "In a meeting", "Back soon", "Working from home", "Off sick")
_JOBS: Final = (("rspec unit", "test"), ("eslint", "lint"), ("compile assets", "build"), ("deploy", "deploy"))
_STUCK: Final = ("canceling", "running", "scheduled", "pending")
_ENDED: Final = ("success", "success", "failed", "canceled", "skipped")

Rows = list[dict[str, Any]]


def add_sample_rows(settings: Settings, found: Iterable[Family] | None = None) -> dict[str, int]:
    """Add rows to the empty tables of the built-in families in one transaction, and return their number by table.

    Parameters:
      found: Families whose tables are in the current database; by default all.

    Git refs are left out if the settings have no folder with repositories.

    Raises:
      WrongArgument: One of the tables has rows; nothing is changed.
    """
    active = {family.name: family for family in (families(settings) if found is None else found)}
    makers = {name: make for name, make in _MAKERS.items() if name in active}
    if settings.repositories_root is None:
        makers.pop("batched_git_ref_updates", None)
    models = [model for name, family in active.items() if name in makers for model in family.models.values()]
    with database.atomic():
        for model in models:
            if model.select().limit(1).exists():
                raise WrongArgument(
                    f"table {_name(model)} already has rows; sample data is only for empty tables, and none was added"
                )
        now = database_now()
        for make in makers.values():
            make(now)
    return {_name(model): model.select().count() for model in models}


def _user_statuses(now: datetime) -> None:
    due, later = ROWS * 2 // 3, ROWS // 4
    times = [
        *(now - timedelta(days=2) * (number / due) for number in range(1, due + 1)),
        *(now + timedelta(minutes=number) for number in range(1, later + 1)),
        *([None] * (ROWS - due - later)),
    ]
    rows: Rows = [
        {"user_id": number, "emoji": "calendar", "message": _of(_MESSAGES, number), "clear_status_at": at}
        for number, at in enumerate(times, 1)
    ]
    UserStatus.insert_many(rows).execute()


def _bulk_imports(now: datetime) -> None:
    """Add imports with entities and trackers; every fifth has been stuck for over a day."""
    imports: Rows = []
    for number in range(_IMPORTS):
        at = now - (timedelta(hours=25 + number) if number % 5 == 0 else timedelta(minutes=5 * number))
        status = "STARTED" if number % 5 == 0 else _of(("STARTED", "FINISHED", "FINISHED", "FAILED"), number)
        imports.append({"user_id": 1 + number % 40, "source_type": 0, "status": ImportStatus[status], **_times(at)})
    entities: Rows = []
    for import_id, row in zip(_insert(BulkImport, imports), imports, strict=True):
        for number in range(3):
            entities.append(
                {
                    "bulk_import": import_id,
                    "namespace_id": None if number else import_id,
                    "project_id": 3 * import_id + number if number else None,
                    "source_type": SourceType.PROJECT_ENTITY if number else SourceType.GROUP_ENTITY,
                    "source_full_path": f"acme/team-{import_id}" + (f"/project-{number}" if number else ""),
                    "destination_name": f"team-{import_id}",
                    "destination_namespace": "moved",
                    "status": row["status"],
                    **_times(row["updated_at"]),
                }
            )
    trackers: Rows = [
        {
            "bulk_import_entity": entity_id,
            "relation": "members",
            "status": TrackerStatus[row["status"].name],
            **_times(row["updated_at"]),
        }
        for entity_id, row in zip(_insert(BulkImportEntity, entities), entities, strict=True)
    ]
    _insert(BulkImportTracker, trackers)


def _deletions(now: datetime) -> None:
    rows: Rows = [
        {"project_id": 1 + number % 10, "ref": f"refs/heads/fix-{number:03}", **_times(now)} for number in range(ROWS)
    ]
    _insert(Deletion, rows)


def _ci_builds(now: datetime) -> None:
    """Add builds; a third is stuck, a sixth is running, the rest has ended."""
    rows: Rows = []
    for number in range(ROWS):
        ended, stuck = number % 2 == 0, number % 6 in (1, 3)
        began = now - (timedelta(hours=26, seconds=10 * number) if stuck or ended else timedelta(seconds=number))
        name, stage = _of(_JOBS, number)
        status = _of(_ENDED, number // 2) if ended else _of(_STUCK, number // 6)
        rows.append(
            {
                "type": "Ci::Build",
                "status": status,
                **_times(began),
                "finished_at": began + timedelta(minutes=9) if ended else None,
                "scheduled_at": began + timedelta(minutes=10) if status == "scheduled" else None,
                "project_id": 1 + number % 40,
                "runner_id": 1 + number % 12,
                "name": name,
                "stage": stage,
                "commit_id": 1 + number // 5,
                "failure_reason": 1 if status == "failed" else None,
                "lock_version": number % 6,
            }
        )
    _insert(Build, rows)


#: Family -> function that fills its tables.
_MAKERS: Final[dict[str, Callable[[datetime], None]]] = {
    "user_status_cleanup": _user_statuses,
    "bulk_imports": _bulk_imports,
    "batched_git_ref_updates": _deletions,
    "ci_stuck_builds": _ci_builds,
}


def _insert(model: type[Model], rows: Rows) -> list[int]:
    """Insert the rows and return their ids in the same order."""
    inserted: Any = model.insert_many(rows).returning(model._meta.primary_key).tuples().execute()
    return sorted(number for (number,) in inserted)


def _times(at: datetime) -> dict[str, datetime]:
    return {"created_at": at, "updated_at": at}


def _of(choices: Sequence[Any], number: int) -> Any:
    return choices[number % len(choices)]


def _name(model: type[Model]) -> str:
    meta: Any = model._meta
    return str(meta.table_name)
