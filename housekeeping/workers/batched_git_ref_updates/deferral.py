"""Projects that are scheduled later because git rejected every ref of their last cleanup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from peewee import SQL, Select, fn

from housekeeping.database.replicas import read_database
from housekeeping.sweeps import deferred
from housekeeping.workers.batched_git_ref_updates.models import Deletion, DeletionStatus

#: The worker whose rejections count.
CLEANUP: Final = "batched_git_ref_updates.project_cleanup"
#: The id of the last row that the project's last run looked at: the first value of its position.
_LAST_ID: Final = SQL("(later.position ->> 0)::bigint")


def any_deferred() -> bool:
    """Return whether there are projects whose time to be scheduled again has not come."""
    found: Any = deferred(CLEANUP).limit(1).tuples()
    return bool(list(found.execute(read_database())))


def deferred_among(projects: Sequence[int]) -> set[int]:
    """Return those of the projects that are to be scheduled later, and have no new pending rows since.

    One statement; one index probe for each project whose time has not come.
    """
    later = deferred(CLEANUP, projects).alias("later")
    waiting: Any = Select((later,), (later.c.subject,)).where(~_has_rows(later, Deletion.id > _LAST_ID)).tuples()
    return {int(subject) for (subject,) in waiting.execute(read_database())}


def count_deferred() -> int:
    """Return how many projects with pending rows are to be scheduled later."""
    later = deferred(CLEANUP).alias("later")
    old, new = _has_rows(later, Deletion.id <= _LAST_ID), _has_rows(later, Deletion.id > _LAST_ID)
    counted: Any = Select((later,), (fn.COUNT(later.c.subject.distinct()),)).where(old & ~new).tuples()
    number: int = next(iter(counted.execute(read_database())))[0]
    return number


def _has_rows(later: Any, which: Any) -> Any:
    """That the project has such pending rows."""
    ours = (Deletion.project_id == later.c.subject.cast("bigint")) & (Deletion.status == DeletionStatus.pending)
    return fn.EXISTS(Deletion.select(SQL("1")).where(ours & which))
