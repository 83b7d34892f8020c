"""The scheduler's pass: the projects with pending deletions, each enqueued for its cleanup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from dramatiq import Actor
from peewee import JOIN, SQL, Select, Value, fn

from housekeeping.database.replicas import read_database
from housekeeping.middleware.enqueueing.many import enqueue_many
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

_SAMPLES: Final = 5
#: Where a statement takes what is known only when it is carried out.
_AFTER, _UNTIL, _LIMIT = (Value(place, converter=False, unpack=False) for place in ("after", "until", "limit"))


@dataclass(frozen=True, slots=True)
class _Round:
    """Where a run stands on its way through all project ids and around.

    Attributes:
      run_id: Whose way it is; another run's place is where this one begins.
      last: The last project enqueued; null: the front.
      began_after: The project after which the run began, and with which it ends; null: at the front.
      wrapped: Whether the end was passed and the run is on its way from the front.
      projects: How many it has enqueued.
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
        """The last project that is still to be met on this part of the way; null: whatever there is."""
        return self.began_after if self.wrapped else None

    def as_position(self) -> Position:
        return (self.run_id, self.last, self.began_after, self.wrapped, self.projects)


@dataclass(frozen=True, slots=True)
class _Enqueued:
    projects: Sequence[int]  # without those that are deferred
    deduplicated: int
    after: _Round
    left: bool


@dataclass(frozen=True, kw_only=True)
class PendingProjects:
    """Enqueues the cleanup of every project with pending deletions, in batches, until there are no more or too many.

    It begins after the last project of a run that was cut short, goes on at the front when it has come to the end,
    and ends where it began: every project is met once a run at most. A project whose last cleanup rejected every row
    is left out until its delay has passed, unless it has new pending rows.

    Attributes:
      children: The actor that is sent the projects' ids, asked for when there is something to send.
      batch_size: Projects a batch.
      max_projects: Projects a run.
    """

    children: Callable[[], Actor[..., Any]]
    batch_size: int
    max_projects: int
    name: str = "projects"
    deferral: _Deferral = field(default_factory=lambda: _Deferral(), init=False, repr=False, compare=False)
    search: _Search = field(default_factory=lambda: _Search(), init=False, repr=False, compare=False)

    def prepare(self, batch: Batch) -> _Enqueued:
        """Enqueue a batch; repeated, it finds its messages waiting and adds none.

        Raises:
          RedisUnavailable: When the queue cannot be reached.
        """
        begun = _Round.of(batch)
        size = min(self.batch_size, self.max_projects - begun.projects)
        found = self.search.projects(begun.last, begun.until, size + 1)
        page = found[:size]
        projects = self.deferral.without_deferred(page)
        duplicates = 0
        if projects:
            with translate_redis_errors():
                messages = enqueue_many(self.children(), projects, trigger="parent")
            duplicates = sum("duplicate_of" in message.options for message in messages)
        last = page[-1] if page else begun.last
        after = _Round(batch.run_id, last, begun.began_after, begun.wrapped, begun.projects + len(projects))
        left = len(found) > size
        if not left and not begun.wrapped and begun.began_after is not None:
            left = bool(self.search.projects(None, begun.began_after, 1))
            after = _Round(batch.run_id, None, begun.began_after, True, after.projects)
        return _Enqueued(projects, duplicates, after, left)

    def apply(self, batch: Batch, prepared: _Enqueued) -> BatchResult:
        """Nothing but what the engine writes."""
        counts = {
            "total_projects": len(prepared.projects),
            "enqueued": len(prepared.projects) - prepared.deduplicated,
            "deduplicated": prepared.deduplicated,
        }
        full = prepared.left and prepared.after.projects >= self.max_projects
        return BatchResult(counts, prepared.after.as_position(), not prepared.left, stop="limit" if full else None)

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        """Nothing to say of single projects."""

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        found = count_pending_projects(limit + 1)
        return Backlog(min(found, limit), found <= limit)

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        """Nothing: no index knows the oldest row, and a project's id is no age."""
        return None

    def explain_queries(self, now: datetime) -> list[ExplainQuery]:
        return [ExplainQuery("the projects with pending deletions", _each_project(None, None).limit(100), Deletion)]

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        stale = self.backlog(now, limit)
        projects = self.deferral.without_deferred(pending_projects(None, None, _SAMPLES))
        due = stale.rows - (count_deferred() if stale.rows else 0)
        # Which of them wait already is not asked of Redis.
        counts = {"total_projects": max(0, min(due, self.max_projects))}
        return StagePlan(self.name, stale, counts, samples=[{"project_id": project} for project in projects])


class _Deferral:
    """Leaves out the projects that are to be scheduled later; asks once a run whether there are any."""

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
    """The ids of projects with pending deletions, in order, each once, by one index probe a project.

    Parameters:
      after: Only those after this one.
      until: Only those up to this one.
    """
    return _Search().projects(after, until, limit)


class _Search:
    """`pending_projects`, its statements put together once: that takes longer than to carry one out."""

    def __init__(self) -> None:
        self._made: dict[tuple[bool, bool], tuple[str, list[Any]]] = {}

    def projects(self, after: int | None, until: int | None, limit: int) -> list[int]:
        form = (after is not None, until is not None)
        if form not in self._made:
            some = _each_project(_AFTER if form[0] else None, _UNTIL if form[1] else None).limit(_LIMIT).alias("some")
            # A SELECT from it, not a WITH: what may write is preceded by a question whether the server is there.
            query = Select((some,), (some.c.project_id,))
            self._made[form] = database.get_sql_context().sql(query).query()
        text, places = self._made[form]
        values = {"after": after, "until": until, "limit": limit}
        # A project that a replica does not know of yet is met by the next run; one that is done by now costs its
        # cleanup a look.
        cursor = read_database().execute_sql(text, [values.get(place, place) for place in places])
        return [project for (project,) in cursor.fetchall()]


def count_pending_projects(limit: int) -> int:
    """How many projects have pending deletions, counted up to `limit`."""
    query: Any = _each_project(None, None).limit(limit).select_from(fn.COUNT(SQL("1")))
    number: int = next(iter(query.tuples().execute(read_database())))[0]
    return number


def _each_project(after: Any, until: Any) -> Any:
    """A loose index scan: from each project to the next, past all rows of the same one."""
    first = _next_project(Deletion.alias("first"), None if after is None else lambda project: project > after, until)
    # In a FROM of its own, because a part of a UNION may have no LIMIT.
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
