"""Stage of the scheduling worker: enqueues one cleanup for every project with pending deletions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final

from peewee import SQL, Select, fn

import housekeeping
from housekeeping import (
    Backlog,
    Batch,
    BatchResult,
    ExplainQuery,
    Position,
    RedisUnavailable,
    StagePlan,
    current_database,
    deferred,
    translate_redis_errors,
)
from housekeeping.workers.batched_git_ref_updates.models import Deletion, DeletionStatus

if TYPE_CHECKING:
    from dramatiq import Actor

#: The worker whose rejections defer a project.
CLEANUP: Final = "batched_git_ref_updates.project_cleanup"
#: Bulk commands whose projects one statement finds and one transaction counts; together they take about 50 ms.
_BULKS: Final = 10
_SAMPLES: Final = 5
#: Projects with pending rows up to which the oldest row is looked for.
_MOST_PROBED: Final = 10_000
#: The id of the last row that the project's last run read: the first value of its cursor. If that run failed, no row
#: counts as new.
_LAST_ID: Final = SQL("coalesce((later.position ->> 0)::bigint, 9223372036854775807)")


@dataclass(frozen=True, slots=True)
class _Round:
    """Cursor of a run that visits all project ids once and wraps around at the highest one.

    Attributes:
      run_id: The run that saved the cursor. The next run starts where this cursor ended.
      last: The last enqueued project; None before the lowest id.
      began_after: The project after which the run began, and with which it ends; None for the lowest id.
      wrapped: Whether the run has passed the highest id and continued with the lowest.
      projects: Number of enqueued projects.
    """

    run_id: int | None
    last: int | None = None
    began_after: int | None = None
    wrapped: bool = False
    projects: int = 0

    @classmethod
    def of(cls, batch: Batch) -> _Round:
        if batch.after is None:
            return cls(batch.run_id)
        found = cls(*batch.after)
        return found if found.run_id == batch.run_id else cls(batch.run_id, found.last, found.last)

    @property
    def until(self) -> int | None:
        """The project at which this part of the round ends; None for the highest id."""
        return self.began_after if self.wrapped else None

    def as_position(self) -> Position:
        return (self.run_id, self.last, self.began_after, self.wrapped, self.projects)


@dataclass(frozen=True, slots=True)
class _Enqueued:
    projects: int  # without deferred projects
    deduplicated: int
    after: _Round
    left: bool


@dataclass(frozen=True, kw_only=True)
class PendingProjects:
    """Stage that enqueues the cleanup of every project with pending deletions, in bulk, up to a limit.

    If the previous run was cut short, a run begins after its last project, wraps around, and ends where it began. So no
    run enqueues a project twice. A project is deferred if its last cleanup failed or rejected every row. It is skipped
    until its delay has passed. A new pending row ends the delay, unless the cleanup failed.

    Attributes:
      children: Returns the actor that cleans up one project; called only if there is a project to enqueue.
      batch_size: Projects per bulk command.
      max_projects: Projects per run.
    """

    children: Callable[[], Actor[..., Any]]
    batch_size: int
    max_projects: int
    name: str = "projects"
    needs_redis: ClassVar[str] = "it sends messages"
    counts: tuple[str, ...] = ("total_projects", "enqueued", "deduplicated")
    progress_counts: tuple[str, ...] = ("total_projects",)

    def prepare(self, batch: Batch) -> _Enqueued:
        """Find projects by one statement and enqueue their cleanups in bulk. Repeating it adds no second message.

        Raises:
          RedisUnavailable: The queue cannot be reached.
        """
        from dramatiq.middleware import MiddlewareError

        position = _Round.of(batch)
        size = min(self.batch_size * _BULKS, self.max_projects - position.projects)
        found = pending_projects(position.last, position.until, size + 1)
        deferred_projects = deferred_among(found[:size])
        enqueued = duplicates = 0
        last = position.last
        for start in range(0, len(found[:size]), self.batch_size):
            if start and batch.time_is_up():
                break
            bulk = found[start : min(start + self.batch_size, size)]
            projects = [project for project in bulk if project not in deferred_projects]
            try:
                duplicates += self._enqueue(projects)
            except (RedisUnavailable, MiddlewareError):
                if not enqueued:
                    raise
                break  # count what was enqueued; the next batch gets the same error
            enqueued, last = enqueued + len(projects), bulk[-1]
        after = replace(position, last=last, projects=position.projects + enqueued)
        left = bool(found) and found[-1] != last
        if not left and not position.wrapped and position.began_after is not None:
            left = bool(pending_projects(None, position.began_after, 1))
            after = replace(after, last=None, wrapped=True)
        return _Enqueued(enqueued, duplicates, after, left)

    def _enqueue(self, projects: Sequence[int]) -> int:
        """Enqueue the cleanups by one command; return how many were duplicates."""
        if not projects:
            return 0
        with translate_redis_errors():
            messages = housekeeping.enqueue_many(self.children(), projects, trigger="parent")
        return sum("duplicate_of" in message.options for message in messages)

    def apply(self, batch: Batch, enqueued: _Enqueued) -> BatchResult:
        """Return the counts; the engine writes them to the run's row."""
        counts = {
            "total_projects": enqueued.projects,
            "enqueued": enqueued.projects - enqueued.deduplicated,
            "deduplicated": enqueued.deduplicated,
        }
        full = enqueued.left and enqueued.after.projects >= self.max_projects
        return BatchResult(counts, enqueued.after.as_position(), not enqueued.left, stop="limit" if full else None)

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        """Do nothing: the messages are sent in `prepare`."""

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        found = count_pending_projects(limit + 1)
        return Backlog(min(found, limit), found <= limit)

    def oldest(self, now: datetime, argument: Any = None) -> datetime | None:
        """Return when the oldest pending row was created, by an index probe per project; None for too many."""
        projects = _each_project(None, None).limit(_MOST_PROBED + 1).alias("projects")
        # A range with one project, as in `cleanup.in_order`.
        of_project = Deletion.project_id.between(projects.c.project_id, projects.c.project_id)
        pending = Deletion.select(Deletion.created_at).where(of_project & (Deletion.status == DeletionStatus.pending))
        first = pending.order_by(Deletion.project_id, Deletion.id).limit(1)
        found: Any = Select((projects,), [fn.COUNT(SQL("1")), fn.MIN(first)]).tuples()
        number, created_at = next(iter(found.execute(_read_database())))
        return created_at if number <= _MOST_PROBED else None

    def explain_queries(self, now: datetime) -> list[ExplainQuery]:
        return [ExplainQuery("the projects with pending deletions", _each_project(None, None).limit(100), Deletion)]

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        stale = self.backlog(now, limit)
        first = pending_projects(None, None, _SAMPLES)
        skipped = deferred_among(first)
        due = stale.rows - (count_deferred() if stale.rows else 0)
        # Duplicates are not counted, because a plan does not query Redis.
        counts = {"total_projects": max(0, min(due, self.max_projects))}
        return StagePlan(
            self.name, stale, counts, samples=[{"project_id": project} for project in first if project not in skipped]
        )


def pending_projects(after: int | None, until: int | None, limit: int) -> list[int]:
    """Return the ids of projects with pending deletions in ascending order, with one index probe per project.

    Parameters:
      after: Only projects after this one.
      until: Only projects up to this one.
    """
    page = _each_project(after, until).limit(limit).alias("page")
    # A SELECT and not a WITH: before a statement that may write, the connection is checked with a round trip. A project
    # that a replica does not have yet is enqueued by the next run. One that is already done costs an empty cleanup.
    query: Any = Select((page,), (page.c.project_id,)).tuples()
    return [project for (project,) in query.execute(_read_database())]


def count_pending_projects(limit: int) -> int:
    """Return the number of projects with pending deletions, counted up to `limit`."""
    query: Any = _each_project(None, None).limit(limit).select_from(fn.COUNT(SQL("1")))
    number: int = next(iter(query.tuples().execute(_read_database())))[0]
    return number


def deferred_among(projects: Sequence[int]) -> set[int]:
    """Return the projects that are deferred. One with new pending rows is not, unless its last cleanup failed.

    One statement with one index probe for each deferred project.
    """
    if not projects:
        return set()
    later = deferred(CLEANUP, projects).alias("later")
    found: Any = Select((later,), (later.c.subject,)).where(~_has_rows(later, Deletion.id > _LAST_ID)).tuples()
    return {int(subject) for (subject,) in found.execute(_read_database())}


def count_deferred() -> int:
    """Return the number of deferred projects with pending rows."""
    later = deferred(CLEANUP).alias("later")
    old, new = _has_rows(later, Deletion.id <= _LAST_ID), _has_rows(later, Deletion.id > _LAST_ID)
    counted: Any = Select((later,), (fn.COUNT(later.c.subject.distinct()),)).where(old & ~new).tuples()
    number: int = next(iter(counted.execute(_read_database())))[0]
    return number


def _read_database() -> Any:
    return housekeeping.read_database(current_database.selected)


def _has_rows(later: Any, which: Any) -> Any:
    """Return the predicate that the deferred project has such pending rows."""
    pending = (Deletion.project_id == later.c.subject.cast("bigint")) & (Deletion.status == DeletionStatus.pending)
    return fn.EXISTS(Deletion.select(SQL("1")).where(pending & which))


def _each_project(after: int | None, until: int | None) -> Any:
    """Select the projects by a loose index scan, which needs one index probe per project."""

    def least_project(table: Any, beyond: Any) -> Any:
        query = table.select(fn.MIN(table.project_id)).where(table.status == DeletionStatus.pending)
        if beyond is not None:
            query = query.where(table.project_id > beyond)
        return query if until is None else query.where(table.project_id <= until)

    pending = least_project(Deletion.alias("first"), after).cte("pending", recursive=True, columns=("project_id",))
    further = least_project(Deletion.alias("further"), pending.c.project_id)
    found = pending.union_all(Select((pending,), (further,)).where(pending.c.project_id.is_null(False)))
    return found.select_from(found.c.project_id).where(found.c.project_id.is_null(False))  # after the last one: NULL
