"""Deferred projects: git rejected every ref of their last cleanup, so they are scheduled later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from peewee import SQL, Select, fn

from housekeeping.database.replicas import read_database
from housekeeping.sweeps import deferred
from housekeeping.workers.batched_git_ref_updates.models import Deletion, DeletionStatus

#: The worker whose rejections defer a project.
CLEANUP: Final = "batched_git_ref_updates.project_cleanup"
#: The id of the last row that the project's last run read: the first value of its cursor.
_LAST_ID: Final = SQL("(later.position ->> 0)::bigint")


def any_deferred() -> bool:
    """Return whether any project is deferred."""
    found: Any = deferred(CLEANUP).limit(1).tuples()
    return bool(list(found.execute(read_database())))


def deferred_among(projects: Sequence[int]) -> set[int]:
    """Return the projects that are deferred and have no new pending rows.

    One statement with one index probe for each deferred project.
    """
    later = deferred(CLEANUP, projects).alias("later")
    found: Any = Select((later,), (later.c.subject,)).where(~_has_rows(later, Deletion.id > _LAST_ID)).tuples()
    return {int(subject) for (subject,) in found.execute(read_database())}


def count_deferred() -> int:
    """Return the number of deferred projects with pending rows."""
    later = deferred(CLEANUP).alias("later")
    old, new = _has_rows(later, Deletion.id <= _LAST_ID), _has_rows(later, Deletion.id > _LAST_ID)
    counted: Any = Select((later,), (fn.COUNT(later.c.subject.distinct()),)).where(old & ~new).tuples()
    number: int = next(iter(counted.execute(read_database())))[0]
    return number


def _has_rows(later: Any, which: Any) -> Any:
    """Return the predicate that the deferred project has such pending rows."""
    pending = (Deletion.project_id == later.c.subject.cast("bigint")) & (Deletion.status == DeletionStatus.pending)
    return fn.EXISTS(Deletion.select(SQL("1")).where(pending & which))
