"""Stage of the scheduling worker: enqueues one cleanup for every project with pending deletions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from peewee import JOIN, SQL, Select, Value, fn

from housekeeping.database.replicas import read_database
from housekeeping.sweeps import (
    Backlog,
    Batch,
    BatchResult,
    ExplainQuery,
    Position,
    StagePlan,
    database,
    translate_redis_errors,
)
from housekeeping.workers.batched_git_ref_updates.deferral import any_deferred, count_deferred, deferred_among
from housekeeping.workers.batched_git_ref_updates.models import Deletion, DeletionStatus

if TYPE_CHECKING:
    from dramatiq import Actor

_SAMPLES: Final = 5
#: Placeholders of prepared statements.
_AFTER, _UNTIL, _LIMIT = (Value(place, converter=False, unpack=False) for place in ("after", "until", "limit"))


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
    projects: Sequence[int]  # without deferred projects
    deduplicated: int
    after: _Round
    left: bool


@dataclass(frozen=True, kw_only=True)
class PendingProjects:
    """Stage that enqueues the cleanup of every project with pending deletions, in batches, up to a limit.

    If the previous run was cut short, a run begins after its last project, wraps around, and ends where it began. So no
    run enqueues a project twice. A project is deferred if its last cleanup rejected every row. It is skipped until its
    delay has passed or it has new pending rows.

    Attributes:
      children: Returns the actor that cleans up one project; called only if there is a project to enqueue.
      batch_size: Projects per batch.
      max_projects: Projects per run.
    """

    children: Callable[[], Actor[..., Any]]
    batch_size: int
    max_projects: int
    name: str = "projects"
    deferral: _Deferral = field(default_factory=lambda: _Deferral(), init=False, repr=False, compare=False)
    search: _Search = field(default_factory=lambda: _Search(), init=False, repr=False, compare=False)

    def prepare(self, batch: Batch) -> _Enqueued:
        """Enqueue the cleanups of a batch of projects. Repeating it adds no second message.

        Raises:
          RedisUnavailable: The queue cannot be reached.
        """
        from housekeeping.middleware.enqueueing.many import enqueue_many

        position = _Round.of(batch)
        size = min(self.batch_size, self.max_projects - position.projects)
        found = self.search.projects(position.last, position.until, size + 1)
        page = found[:size]
        projects = self.deferral.without_deferred(page)
        duplicates = 0
        if projects:
            with translate_redis_errors():
                messages = enqueue_many(self.children(), projects, trigger="parent")
            duplicates = sum("duplicate_of" in message.options for message in messages)
        last = page[-1] if page else position.last
        after = _Round(batch.run_id, last, position.began_after, position.wrapped, position.projects + len(projects))
        left = len(found) > size
        if not left and not position.wrapped and position.began_after is not None:
            left = bool(self.search.projects(None, position.began_after, 1))
            after = _Round(batch.run_id, None, position.began_after, True, after.projects)
        return _Enqueued(projects, duplicates, after, left)

    def apply(self, batch: Batch, enqueued: _Enqueued) -> BatchResult:
        """Return the counts; the engine writes them to the run's row."""
        counts = {
            "total_projects": len(enqueued.projects),
            "enqueued": len(enqueued.projects) - enqueued.deduplicated,
            "deduplicated": enqueued.deduplicated,
        }
        full = enqueued.left and enqueued.after.projects >= self.max_projects
        return BatchResult(counts, enqueued.after.as_position(), not enqueued.left, stop="limit" if full else None)

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        """Do nothing: the messages are sent in `prepare`."""

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        found = count_pending_projects(limit + 1)
        return Backlog(min(found, limit), found <= limit)

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        """Return None: no index could find the oldest row."""
        return None

    def explain_queries(self, now: datetime) -> list[ExplainQuery]:
        return [ExplainQuery("the projects with pending deletions", _each_project(None, None).limit(100), Deletion)]

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        stale = self.backlog(now, limit)
        projects = self.deferral.without_deferred(pending_projects(None, None, _SAMPLES))
        due = stale.rows - (count_deferred() if stale.rows else 0)
        # Duplicates are not counted, because a plan does not query Redis.
        counts = {"total_projects": max(0, min(due, self.max_projects))}
        return StagePlan(self.name, stale, counts, samples=[{"project_id": project} for project in projects])


class _Deferral:
    """Filter that drops deferred projects. It queries once per run whether there are any."""

    def __init__(self) -> None:
        self._any: bool | None = None

    def without_deferred(self, projects: Sequence[int]) -> Sequence[int]:
        if self._any is None:
            self._any = any_deferred()
        if not (self._any and projects):
            return projects
        deferred = deferred_among(projects)
        return [project for project in projects if project not in deferred]


def pending_projects(after: int | None, until: int | None, limit: int) -> list[int]:
    """Return the ids of projects with pending deletions in ascending order, with one index probe per project.

    Parameters:
      after: Only projects after this one.
      until: Only projects up to this one.
    """
    return _Search().projects(after, until, limit)


class _Search:
    """Query for projects with pending deletions. Its SQL is cached, because compiling takes longer than executing."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[bool, bool], tuple[str, list[Any]]] = {}

    def projects(self, after: int | None, until: int | None, limit: int) -> list[int]:
        shape = (after is not None, until is not None)
        if shape not in self._compiled:
            page = _each_project(_AFTER if shape[0] else None, _UNTIL if shape[1] else None).limit(_LIMIT).alias("page")
            # A SELECT and not a WITH: before a statement that may write, the connection is checked with a round trip.
            query = Select((page,), (page.c.project_id,))
            self._compiled[shape] = database.get_sql_context().sql(query).query()
        text, parameters = self._compiled[shape]
        values = {"after": after, "until": until, "limit": limit}
        # A project that a replica does not have yet is enqueued by the next run. One that is already done costs an
        # empty cleanup.
        cursor = read_database().execute_sql(text, [values.get(place, place) for place in parameters])
        return [project for (project,) in cursor.fetchall()]


def count_pending_projects(limit: int) -> int:
    """Return the number of projects with pending deletions, counted up to `limit`."""
    query: Any = _each_project(None, None).limit(limit).select_from(fn.COUNT(SQL("1")))
    number: int = next(iter(query.tuples().execute(read_database())))[0]
    return number


def _each_project(after: Any, until: Any) -> Any:
    """Select the projects by a loose index scan, which needs one index probe per project."""
    first = _next_project(Deletion.alias("first"), None if after is None else lambda project: project > after, until)
    # In a subquery, because a part of a UNION may have no LIMIT.
    pending = Select((first.alias("front"),), (SQL("front.project_id"),)).cte(
        "pending", recursive=True, columns=("project_id",)
    )
    following = _next_project(Deletion.alias("following"), lambda project: project > pending.c.project_id, until)
    further = following.alias("further")
    onward = Select((pending,), (further.c.project_id,)).join(further, JOIN.LATERAL, on=SQL("true"))
    found = pending.union_all(onward)
    return found.select_from(found.c.project_id)


def _next_project(table: Any, beyond: Callable[[Any], Any] | None, until: Any) -> Any:
    query = table.select(table.project_id).where(table.status == DeletionStatus.pending)
    if beyond is not None:
        query = query.where(beyond(table.project_id))
    if until is not None:
        query = query.where(table.project_id <= until)
    return query.order_by(table.project_id).limit(1)
