"""Stage of the cleanup: deletes the refs of a project's pending rows page by page and marks the rows as processed."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from datetime import datetime
from typing import Any, Final

from housekeeping.core import events
from housekeeping.sweeps import (
    HEARTBEAT,
    Announcement,
    Backlog,
    Batch,
    BatchResult,
    ExplainQuery,
    Failure,
    Position,
    StagePlan,
    log_rows,
    shortened,
)
from housekeeping.workers.batched_git_ref_updates.backends import Backends
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from housekeeping.workers.batched_git_ref_updates.pending import (
    Row,
    count_pending_rows,
    in_order,
    mark_processed,
    pending_among,
    pending_rows,
)
from housekeeping.workers.batched_git_ref_updates.ref_deletion import (
    RefDeletionFailed,
    RefNameTooLong,
    RefsRefused,
    delete_refs,
    is_ref_name,
)

_SAMPLES: Final = 5
_LONGEST_LOGGED: Final = 300  # characters of a ref in a log line


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


@dataclass(frozen=True, slots=True)
class _Page:
    """Results of deleting the refs of a page of rows.

    Attributes:
      deleted: Rows whose ref no longer exists, confirmed by git.
      invalid: Rows whose text is not a valid ref name, or is too long for the repository.
      refused: Rows whose ref git refuses to delete, with the reason.
      end: Where the page ends.
      left: Whether the run has further pending rows to handle.
    """

    deleted: Sequence[Row]
    invalid: Sequence[Row]
    refused: Sequence[tuple[Row, RefsRefused]]
    end: _Place
    left: bool

    def only(self, rows: Sequence[Position]) -> _Page:
        """Return a copy with only these rows."""
        some = set(rows)
        return replace(
            self,
            deleted=[row for row in self.deleted if row in some],
            invalid=[row for row in self.invalid if row in some],
            refused=[(row, refused) for row, refused in self.refused if row in some],
        )


@dataclass(frozen=True, slots=True)
class _Marked(BatchResult):
    """Batch result that also has the rows marked because their ref name is invalid."""

    invalid: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class PendingDeletions:
    """Stage that deletes the refs of a project's pending rows, then marks the rows as processed.

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

    @property
    def batch_size(self) -> int:
        return self.page_size

    def resized(self, batch_size: int) -> PendingDeletions:
        return replace(self, page_size=batch_size)

    def prepare(self, batch: Batch) -> _Page:
        """Delete the refs of the next page of rows. It is safe to repeat.

        Raises:
          SettingsError: No folder of repositories is set.
          RefDeletionFailed: No ref was deleted, for a reason that concerns the whole repository.
        """
        project_id = int(batch.argument)
        repository = self.backends.repositories.locate(project_id)
        place = _Place(*batch.after or ())
        size = min(self.page_size, self.max_deletes - place.handled)
        rows = pending_rows(project_id, place.after, size + 1, place.until)
        if batch.after is None and batch.rejected_until is not None and len(rows) > size:
            # The run may end before the last row. If it began with rows that are refused, those behind would starve.
            place = _Place.behind(batch.rejected_until)
            rows = pending_rows(project_id, place.after, size + 1)
        page, left = rows[:size], len(rows) > size
        refs = list(dict.fromkeys(ref for _, ref in page if is_ref_name(ref)))
        results: dict[str, RefsRefused | None] = {}
        began = time.monotonic()
        for some_refs in _batches(refs, self.git_batch_size):
            try:
                # A user may have created a ref again that another run has deleted meanwhile.
                parts = delete_refs(self.backends.deletion, repository, some_refs, batch.time_is_up, batch.check)
                results.update(parts)
            except RefDeletionFailed:
                if not results:
                    raise
                # Mark the rows of deleted refs first. The next batch raises the error if it persists.
                break
            # A page of slow batches must not delay the heartbeat.
            if batch.time_is_up() or time.monotonic() - began > HEARTBEAT.total_seconds():
                break
        if results:
            # Raises if the disk is gone, so that nothing counts as missing.
            self.backends.repositories.locate(project_id)
        too_long = {ref for ref, refused in results.items() if isinstance(refused, RefNameTooLong)}
        known = list(itertools.takewhile(lambda row: row[1] in results or not is_ref_name(row[1]), page))
        end = place.moved(len(known), known[-1][0] if known else None)
        left = left or len(known) < len(page)
        if not left and not place.wrapped and place.began_after is not None:
            left = bool(pending_rows(project_id, None, 1, place.began_after))
            end = replace(end, after=None, wrapped=True)
        return _Page(
            deleted=[(id, ref) for id, ref in known if ref in results and results[ref] is None],
            invalid=[(id, ref) for id, ref in known if ref not in results or ref in too_long],
            refused=[
                ((id, ref), refused)
                for id, ref in known
                if (refused := results.get(ref)) is not None and ref not in too_long
            ],
            end=end,
            left=left,
        )

    def apply(self, batch: Batch, page: _Page) -> BatchResult:
        """Mark the rows that are still pending and unchanged as processed. Leave locked rows to the next run."""
        project_id = int(batch.argument)
        page = page if batch.only is None else page.only(batch.only)
        pending = pending_among(project_id, [row for row, _ in page.refused])
        failures = [Failure(_record(project_id, row), refused) for row, refused in page.refused if row in pending]
        deleted, invalid = (_marked(project_id, rows) for rows in (page.deleted, page.invalid))
        end = self.after_all(batch, page, ())
        return _Marked(
            counts={"total_deletes": len(deleted), "invalid": len(invalid)},
            position=end.position,
            exhausted=end.exhausted,
            stop=end.stop,
            rows=deleted,
            failures=failures,
            invalid=invalid,
        )

    def positions(self, batch: Batch, page: _Page) -> list[Position]:
        return [*page.deleted, *page.invalid, *(row for row, _ in page.refused)]

    def after_all(self, batch: Batch, page: _Page, positions: Sequence[Position]) -> BatchResult:
        full = page.left and page.end.handled >= self.max_deletes
        return BatchResult({}, astuple(page.end), not page.left, stop="limit" if full else None)

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


def _marked(project_id: int, rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [_record(project_id, row) for row in mark_processed(project_id, rows)] if rows else []


def _record(project_id: int, row: Row) -> dict[str, Any]:
    return {"id": row[0], "project_id": project_id, "ref": row[1]}


def _batches(refs: Sequence[str], size: int) -> list[Sequence[str]]:
    return [refs[start : start + size] for start in range(0, len(refs), size)]
