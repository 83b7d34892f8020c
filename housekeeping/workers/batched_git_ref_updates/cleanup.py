"""Stage of the cleanup: marks a project's pending rows as processed page by page, and deletes their refs with that.

A page is one transaction: its rows are marked, git deletes their refs, and then it is committed. So a row that cannot
be marked, or is locked, keeps its ref. Were git asked first, each run would delete the ref of such a row again, also
when a user has created it again. Only a kill or a lost connection between git and the COMMIT leaves rows pending whose
refs are gone.

The price is a transaction that is open while git runs: usually well under a second, and at most about 45 s. It
locks rows of one project only, which nothing but another cleanup of the project changes. Each call of git is preceded
by a statement, so the transaction is never idle for as long as PostgreSQL allows it to be.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Final

from peewee import CTE, SQL, Select, Tuple, Value, fn

from housekeeping import (
    HEARTBEAT,
    Announcement,
    Backlog,
    Batch,
    BatchResult,
    ExplainQuery,
    Failure,
    Position,
    RowNotChanged,
    StagePlan,
    Unconfirmed,
    current_database,
    events,
    log_rows,
    shortened,
    statement_time,
)
from housekeeping.workers.batched_git_ref_updates.git import (
    Backends,
    RefDeletionFailed,
    RefNameTooLong,
    RefsRefused,
    delete_refs,
    is_ref_name,
)
from housekeeping.workers.batched_git_ref_updates.models import Deletion, DeletionStatus, machine

#: A row's id and its ref.
PendingRow = tuple[int, str]


def pending_rows(project_id: int, after: int | None, limit: int, until: int | None = None) -> list[PendingRow]:
    """Return up to `limit` of a project's pending rows with ids above `after` and up to `until`, in order of id."""
    query: Any = in_order(project_id, after).limit(limit)
    if until is not None:
        query = query.where(Deletion.id <= until)
    return list(query.tuples())


def mark_processed(project_id: int, rows: Sequence[PendingRow]) -> tuple[list[PendingRow], list[PendingRow]]:
    """Mark the rows that are still pending and not locked as processed; one statement.

    Returns:
      The marked rows, and those that PostgreSQL left unchanged without an error, because of a trigger.
    """
    if not rows:
        return [], []
    found = sorted(_marking(project_id, rows).execute(current_database))
    marked = [(id, ref) for id, ref, is_marked in found if is_marked]
    return marked, [(id, ref) for id, ref, is_marked in found if not is_marked]


def _marking(project_id: int, rows: Sequence[PendingRow]) -> Any:
    """Return the statement of `mark_processed`.

    It has no join: PostgreSQL expects one or two rows, and would compare each of the thousand with each. COALESCE keeps
    it from making one.
    """
    locked = _unchanged(project_id, rows).for_update(skip_locked=True).cte("locked", materialized=True)
    update = (
        Deletion.update(
            {Deletion.status: machine.target("process"), Deletion.updated_at: statement_time(Deletion.updated_at)}
        )
        # Project and ids again, for the index. The ref, because an id is not unique in a partitioned table.
        .where(
            (Deletion.project_id == project_id)
            & (Deletion.id == _any_of([id for id, _ in rows]))
            & fn.COALESCE(Tuple(Deletion.id, Deletion.ref).in_(Select((locked,), (locked.c.id, locked.c.ref))), False)
            & Deletion.status.in_(machine.sources("process"))
        )
        .returning(Deletion.id, Deletion.ref, Deletion.status)
    )
    changed = CTE("changed", update)
    marked = Select((changed,), (changed.c.id, changed.c.ref)).where(changed.c.status == machine.target("process"))
    is_marked = Tuple(locked.c.id, locked.c.ref).in_(marked)
    return Select((locked,), (locked.c.id, locked.c.ref, is_marked)).with_cte(locked, changed).tuples()


def count_pending_rows(project_id: int | None, limit: int) -> int:
    """Return the number of pending rows of a project, or of all projects, counted up to `limit`."""
    predicate = Deletion.status == DeletionStatus.pending if project_id is None else _pending_of(int(project_id))
    query: Any = Deletion.select(SQL("1")).where(predicate).limit(limit).select_from(fn.COUNT(SQL("1")))
    number: int = next(iter(query.tuples().execute(current_database)))[0]
    return number


def in_order(project_id: int, after: int | None = None) -> Any:
    """Return the query of a project's pending rows with ids above `after`, in order of id."""
    # A range with one project instead of an equality: with an equality, PostgreSQL may scan the primary key in order
    # of id, past all rows of other projects and all processed rows.
    pending = Deletion.project_id.between(project_id, project_id) & (Deletion.status == DeletionStatus.pending)
    if after is not None:
        pending &= Tuple(Deletion.project_id, Deletion.id) > Tuple(project_id, after)
    return Deletion.select(Deletion.id, Deletion.ref).where(pending).order_by(Deletion.project_id, Deletion.id)


def _pending_of(project_id: int) -> Any:
    return (Deletion.project_id == project_id) & (Deletion.status == DeletionStatus.pending)


def _unchanged(project_id: int, rows: Sequence[PendingRow]) -> Any:
    """Select the rows that are pending and unchanged; a swap of refs among these rows counts as unchanged."""
    ids, refs = zip(*rows, strict=True)
    unchanged = (Deletion.id == _any_of(ids)) & (Deletion.ref == _any_of(sorted(set(refs))))
    return Deletion.select(Deletion.id, Deletion.ref).where(_pending_of(project_id) & unchanged)


def _any_of(values: Sequence[Any]) -> Any:
    # One parameter. To compile a thousand takes a fifth of a run.
    return fn.ANY(Value(list(values), converter=False, unpack=False))


_SAMPLES: Final = 5
_LONGEST_LOGGED: Final = 300  # characters of a ref in a log line
_NOT_CHANGED: Final = "PostgreSQL did not mark the row and reported no error; a trigger may have prevented it"


@dataclass(frozen=True, slots=True)
class _Place:
    """Cursor of a run, which may begin after the rows that the project's last run has handled and wrap around.

    Attributes:
      seen: The highest id that this run or an earlier one has read. Rows above it are new.
      handled: Number of rows that this run has handled.
      after: The id after which the next page begins; None for the lowest id.
      began_after: The id after which the run began, and with which it ends; None for the lowest id.
      wrapped: Whether the run has passed the highest id and continued with the lowest.
    """

    seen: int | None = None
    handled: int = 0
    after: int | None = None
    began_after: int | None = None
    wrapped: bool = False

    @property
    def until(self) -> int | None:
        return self.began_after if self.wrapped else None

    def moved(self, handled: int, last: int | None) -> _Place:
        """Return the place after this many rows, of which the last one has this id."""
        if last is None:
            return self
        return replace(self, seen=max(last, self.seen or last), handled=self.handled + handled, after=last)

    @classmethod
    def behind(cls, position: Position) -> _Place:
        """Return the place behind the rows of an earlier run that ended at this position."""
        seen, _, after, *_ = (*position, None, None)
        return cls(seen=seen, after=after or seen, began_after=after or seen)


@dataclass(slots=True)
class _Page:
    """A page of pending rows, and what git has answered for their refs.

    Attributes:
      began: Where the page begins.
      left: Whether the run has further pending rows to handle behind the page.
      wraps: Whether the run continues with the lowest id after the page.
      results: Refs that git has answered for, each with the reason why it refuses to delete it; None if it is gone.
      unmarked: Rows that are locked, changed meanwhile, or cannot be marked.
      cut: Whether git was stopped before the end of the page. The other rows belong to the next page.
      again: Whether the rows are to be marked again, now that git's answers are known.
    """

    rows: Sequence[PendingRow]
    began: _Place
    left: bool
    wraps: bool
    results: dict[str, RefsRefused | None] = field(default_factory=dict)
    unmarked: set[PendingRow] = field(default_factory=set)
    cut: bool = False
    again: bool = False

    def is_settled(self, row: PendingRow) -> bool:
        """Return whether the row needs no further answer of git."""
        return row[1] in self.results or row in self.unmarked or not is_ref_name(row[1])

    def is_invalid(self, row: PendingRow) -> bool:
        """Return whether the row's text is not a valid ref name, or is too long for the repository."""
        return not is_ref_name(row[1]) or isinstance(self.results.get(row[1]), RefNameTooLong)

    def end(self) -> tuple[_Place, bool]:
        """Return where the page ends, and whether the run has further rows to handle."""
        handled = list(itertools.takewhile(self.is_settled, self.rows)) if self.cut else self.rows
        place = self.began.moved(len(handled), handled[-1][0] if handled else None)
        if len(handled) < len(self.rows):
            return place, True
        return (replace(place, after=None, wrapped=True), True) if self.wraps else (place, self.left)


@dataclass(frozen=True, slots=True)
class _Marked(BatchResult):
    """Batch result that also has the rows marked because their ref name is invalid."""

    invalid: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class PendingDeletions:
    """Stage that marks a project's pending rows as processed, and deletes their refs in the same transaction.

    It reads the rows in order of id. Rows whose ref name is invalid are marked too.

    Attributes:
      backends: Repositories and ref deletion in use.
      page_size: Rows per page, and so per transaction.
      git_batch_size: Refs per git transaction.
      max_deletes: Rows per run, whether or not their refs could be deleted.
    """

    backends: Backends
    page_size: int
    git_batch_size: int
    max_deletes: int
    name: str = "deletions"
    counts: tuple[str, ...] = ("total_deletes", "invalid", "failed")
    progress_counts: tuple[str, ...] = ("total_deletes", "invalid")
    tables: tuple[type[Deletion], ...] = (Deletion,)

    @property
    def batch_size(self) -> int:
        return self.page_size

    def resized(self, batch_size: int) -> PendingDeletions:
        return replace(self, page_size=batch_size)

    def prepare(self, batch: Batch) -> _Page:
        """Read the next page of rows.

        Raises:
          SettingsError: No folder of repositories is set.
        """
        project_id = int(batch.argument)
        place = _Place(*batch.after or ())
        size = min(self.page_size, self.max_deletes - place.handled)
        rows = pending_rows(project_id, place.after, size + 1, place.until)
        if batch.after is None and batch.rejected_until is not None and len(rows) > size:
            # The run may end before the last row. If it began with rows that are refused, those behind would starve.
            place = _Place.behind(batch.rejected_until)
            rows = pending_rows(project_id, place.after, size + 1)
        self.backends.repositories.locate(project_id)
        left, began_after = len(rows) > size, place.began_after
        wraps = not left and not place.wrapped and began_after is not None
        return _Page(rows[:size], place, left, wraps and bool(pending_rows(project_id, None, 1, began_after)))

    def apply(self, batch: Batch, page: _Page) -> BatchResult:
        """Mark the rows that are still pending and unchanged as processed. Leave locked rows to the next run.

        The refs of the marked rows are deleted when everything else of the transaction has succeeded.
        """
        project_id = int(batch.argument)
        answered_only, page.again = page.cut or page.again, False
        rows: Sequence[Any] = page.rows if batch.only is None else batch.only
        if answered_only:
            rows = [row for row in rows if page.is_settled(row)]
        invalid = [row for row in rows if page.is_invalid(row)]
        refused = [(row, error) for row in rows if (error := page.results.get(row[1])) and row not in invalid]
        valid = [row for row in rows if is_ref_name(row[1]) and page.results.get(row[1]) is None]
        if answered_only:
            valid = [row for row in valid if row[1] in page.results]
        if batch.only is not None and len(rows) == 1:
            page.unmarked.update(valid)  # if it raises, the row has failed alone
        (deleted, kept), (invalid, kept_invalid) = (mark_processed(project_id, rows) for rows in (valid, invalid))
        failed = [*refused, *((row, RowNotChanged(_NOT_CHANGED)) for row in (*kept, *kept_invalid))]
        page.unmarked.update(valid)
        page.unmarked.difference_update(deleted)
        unanswered = list(dict.fromkeys(ref for _, ref in deleted if ref not in page.results))
        end = self.after_all(batch, page, ())
        return _Marked(
            counts={"total_deletes": len(deleted), "invalid": len(invalid)},
            position=end.position,
            exhausted=end.exhausted,
            stop=end.stop,
            rows=[_record(project_id, row) for row in deleted],
            failures=[Failure(_record(project_id, row), error) for row, error in failed],
            confirm=partial(self._delete, batch, page, unanswered) if unanswered else None,
            invalid=[_record(project_id, row) for row in invalid],
        )

    def _delete(self, batch: Batch, page: _Page, refs: Sequence[str]) -> None:
        """Delete the refs of the rows that the open transaction has marked.

        Raises:
          Unconfirmed: Some refs are still there, because git refuses to delete them or the run must end. The page knows
            which ones.
          RefDeletionFailed: No ref was deleted, for a reason that concerns the whole repository.
        """
        # A deferred constraint must not wait for the COMMIT to reject a row.
        current_database.execute_sql("SET CONSTRAINTS ALL IMMEDIATE")
        project_id, began = int(batch.argument), time.monotonic()
        repository = self.backends.repositories.locate(project_id)

        def must_end() -> bool:
            # A page of slow batches must not delay the heartbeat.
            return batch.time_is_up() or time.monotonic() - began > HEARTBEAT.total_seconds() / 2

        results: dict[str, RefsRefused | None] = {}
        for some_refs in _batches(refs, self.git_batch_size):
            if results and must_end():
                break
            try:
                # A user may have created a ref again that another run has deleted meanwhile.
                results.update(delete_refs(self.backends.deletion, repository, some_refs, must_end, batch.check))
            except RefDeletionFailed:
                if not results:
                    raise
                # Commit the rows of deleted refs first. The next batch raises the error if it persists.
                break
        # Raises if the disk is gone, so that nothing counts as missing.
        self.backends.repositories.locate(project_id)
        page.results |= results
        page.cut |= len(results) < len(refs)
        if page.cut or any(results.values()):
            page.again = True
            raise Unconfirmed(f"git has not deleted all refs of {repository}")

    def positions(self, batch: Batch, page: _Page) -> list[Position]:
        return list(page.rows)

    def after_all(self, batch: Batch, page: _Page, positions: Sequence[Position]) -> BatchResult:
        place, left = page.end()
        full = left and place.handled >= self.max_deletes
        return BatchResult({}, astuple(place), not left, stop="limit" if full else None)

    def fallback(self, batch: Batch, error: BaseException) -> None:
        """Return None: there is no other way to mark a row."""

    def describe(self, position: Position) -> dict[str, Any]:
        return {"id": position[0], "ref": position[1]}

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        if isinstance(result, _Marked):
            invalid = [{**record, "ref": shortened(record["ref"], _LONGEST_LOGGED)} for record in result.invalid]
            log_rows(__name__, logging.WARNING, "Invalid ref name; row marked as processed", invalid)

    def announcements(self, result: BatchResult) -> Sequence[Announcement]:
        return [Announcement(events.refs_deleted, result.rows)]

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        rows = count_pending_rows(argument, limit + 1)
        return Backlog(min(rows, limit), rows <= limit)

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        """Return the creation time of the project's first pending row; None for all projects, which lack an index."""
        if argument is None:
            return None
        first = in_order(int(argument)).select(Deletion.created_at).limit(1).first()
        return None if first is None else first.created_at

    def statements_of_a_run(self, now: datetime) -> list[Any]:
        """Return the statement that changes the rows of a page, for `housekeeping doctor`."""
        return [_marking(1, [(id, "refs/heads/main") for id in range(self.page_size)])]

    def explain_queries(self, now: datetime) -> list[ExplainQuery]:
        page = in_order(1, 1).limit(self.page_size)
        return [ExplainQuery("a project's pending deletions", page, Deletion)]

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        rows = pending_rows(int(argument), None, self.max_deletes)
        invalid = sum(not is_ref_name(ref) for _, ref in rows)
        return StagePlan(
            self.name,
            self.backlog(now, limit, argument),
            {"total_deletes": len(rows) - invalid, "invalid": invalid},
            self.oldest(now, argument),
            samples=[{"id": id, "ref": ref} for id, ref in rows[:_SAMPLES]],
        )


def _record(project_id: int, row: PendingRow) -> dict[str, Any]:
    return {"id": row[0], "project_id": project_id, "ref": row[1]}


def _batches(refs: Sequence[str], size: int) -> list[Sequence[str]]:
    return [refs[start : start + size] for start in range(0, len(refs), size)]
