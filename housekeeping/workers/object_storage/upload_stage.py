"""Stage for the hash of pending uploads: read pages, delete the objects of stale entries, remove those entries."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from housekeeping.core import events
from housekeeping.sweeps import (
    Announcement,
    Backlog,
    Batch,
    BatchResult,
    Failure,
    ObjectStoreUnavailable,
    RedisUnavailable,
    StagePlan,
    UploadRefused,
    at_work,
    database,
    log_rows,
    store_in_outbox,
)
from housekeeping.workers.object_storage import claims, pending_uploads, stores
from housekeeping.workers.object_storage.claims import Claims
from housekeeping.workers.object_storage.deletion import Deletion
from housekeeping.workers.object_storage.pending_entry import Entry
from housekeeping.workers.object_storage.stale_entries import StaleEntries, classify, number_of, some_of, times

#: Pages that a batch reads in search of stale entries; it takes about 50 ms. Usually most entries are fresh.
_MOST_PAGES: Final = 10
#: Entries that are claimed, deleted and removed together. Lua's stack has room for 8000 values.
_TOGETHER: Final = 2000
#: Added to the longest run's time before its claims count as abandoned: time for the last request, and for a machine
#: that was suspended.
_GRACE: Final = timedelta(minutes=2)
#: Failed entries are not tried again in the same run. Beyond this number one may be counted twice.
_REMEMBERED: Final = 100_000
_SAMPLES: Final = 5


@dataclass(slots=True)
class _Deleted:
    """Results of a batch outside of the database.

    Attributes:
      total: Number of entries in the hash; None except in a run's first batch.
      cursor: Redis cursor of the next batch; 0 if no entries are left.
      complete: Whether everything on these pages was processed in time.
      from_front: Whether the run continues with a full scan, because it was resumed in the middle of the hash.
    """

    total: int | None = None
    cursor: int = 0
    complete: bool = True
    from_front: bool = False
    removed: list[Entry] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


class PendingUploadsStage:
    """Stage that scans the hash once; created for each run.

    Parameters:
      batch_size: Approximate number of entries per page, and of stale entries per batch.
      stale_after: An upload is stale when it was prepared longer ago than this, in whole seconds.
      longest: Maximum time of a run.
      log_records: Whether to log each deletion.
    """

    name: Final = "pending_direct_uploads"

    def __init__(self, batch_size: int, stale_after: timedelta, longest: timedelta, log_records: bool = False) -> None:
        self.batch_size = batch_size
        self._stale_after = stale_after
        self._longest = longest
        self._log_records = log_records
        self._claims: Claims | None = None
        self._deletions: dict[str, Deletion] = {}
        self._failed: set[bytes] = set()
        self._resumed = False

    def resized(self, batch_size: int) -> PendingUploadsStage:
        """Return this stage with another page size; it keeps the run's claims and failures."""
        self.batch_size = batch_size
        return self

    def prepare(self, batch: Batch) -> _Deleted:
        """Read some pages and delete their stale uploads, as far as time and stores allow.

        Raises:
          RedisUnavailable: Entries may remain whose objects are gone. A later run finds the objects missing.
        """
        result = _Deleted()
        if self._claims is None:
            self._resumed = batch.after is not None
            result.total = pending_uploads.count()
            claims.drop_expired()
            self._claims = Claims(self._longest + _GRACE, batch.run_id, lambda: at_work(batch.worker))
        known_failures = len(self._failed)
        result.cursor, stale, refused = self._read(batch)
        for entry, error in refused:
            self._fail(result, entry, error)
        # Entries that failed in this run are not chosen again, so that the next batch gets other ones.
        stale = {
            location: {path: entry for path, entry in entries.items() if entry.field not in self._failed}
            for location, entries in stale.items()
        }
        chosen = some_of(stale, batch.most)
        chunks = [
            (location, entries[start : start + _TOGETHER])
            for location, entries in chosen.items()
            for start in range(0, len(entries), _TOGETHER)
        ]
        for number, (location, entries) in enumerate(chunks, 1):
            try:
                self._delete(result, location, entries, batch)
            except RedisUnavailable:
                if not (result.removed or result.failures):
                    raise
                # Count what was removed. The next batch gets the same error.
                result.complete = False
                break
            if number < len(chunks) and (not result.complete or batch.time_is_up()):
                result.complete = False
                break
        is_shorter = result.removed or len(self._failed) > known_failures
        if is_shorter and number_of(chosen.values()) < number_of(stale.values()):
            result.complete = False  # the limit of the breaker or the pace ends within these pages
        if self._resumed and result.complete and not result.cursor:
            # Redis returns entries in no order, so the second scan covers all of them.
            result.from_front, self._resumed = True, False
        return result

    def apply(self, batch: Batch, result: _Deleted) -> BatchResult:
        """Return the counts; the engine writes them to the run's row."""
        following = (result.cursor,) if result.cursor or result.from_front else None
        counts = {"total_deleted_stale_entries": len(result.removed)}
        if result.total is not None:
            counts["total_pending_entries"] = result.total
        unavailable = [each.unavailable for each in self._deletions.values() if each.unavailable is not None]
        return BatchResult(
            counts,
            # Time was up in the middle of the pages: the next run begins with them.
            following if result.complete else batch.after,
            exhausted=result.complete and following is None,
            rows=_rows(result.removed),
            failures=result.failures,
            unreachable=ObjectStoreUnavailable("; ".join(map(str, unavailable))) if unavailable else None,
        )

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        if self._log_records:
            log_rows(__name__, logging.INFO, "Stale upload deleted", result.rows)

    def announcements(self, result: BatchResult) -> Sequence[Announcement]:
        return [Announcement(events.upload_deleted, result.rows, in_outbox=True)]

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        """Count the stale uploads, without those of disabled stores.

        Note: The hash has no index, so all of it is read unless more than `limit` are found.
        """
        number = 0
        for stale, _ in self._pages(now):
            number += number_of(stale.values())
            if number > limit:
                return Backlog(limit, exact=False)
        return Backlog(number)

    def oldest(self, now: datetime, argument: Any = None) -> datetime | None:
        """Return when the oldest stale upload was prepared, or None if no upload is stale."""
        return min((time for stale, _ in self._pages(now) for time, _, _ in times(stale)), default=None)

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        """Return what a run would delete; the stores are not contacted."""
        number = failed = 0
        oldest: list[tuple[datetime, str, str]] = []
        last: list[datetime] = []
        for stale, refused in self._pages(now):
            failed += len(refused)
            found = list(times(stale))
            number += len(found)
            oldest = heapq.nsmallest(_SAMPLES, [*oldest, *found])
            last = [max(last + [time for time, _, _ in found])] if found else last
        counted = min(number, limit)
        return StagePlan(
            self.name,
            Backlog(counted, number <= limit),
            {
                "total_pending_entries": pending_uploads.count(),
                "total_deleted_stale_entries": counted,
                "failed": failed,
            },
            oldest=oldest[0][0] if oldest else None,
            newest=last[0] if last else None,
            samples=[
                {"location": location, "path": path, "prepared_at": time.isoformat()} for time, location, path in oldest
            ],
        )

    def _first_fresh(self, now: datetime) -> int:
        # Whole seconds; an upload of exactly that age is not stale (document 100, 処理フロー: stale?, strictly).
        return int(now.timestamp()) - int(self._stale_after.total_seconds())

    def _pages(self, now: datetime) -> Iterator[tuple[StaleEntries, list[tuple[Entry, UploadRefused]]]]:
        first_fresh = self._first_fresh(now)
        return (classify(page, first_fresh) for page in pending_uploads.pages(first_fresh))

    def _read(self, batch: Batch) -> tuple[int, StaleEntries, list[tuple[Entry, UploadRefused]]]:
        """Read the next pages. Return the cursor after them, the stale entries, and those that cannot be processed."""
        first_fresh, cursor = self._first_fresh(batch.now), batch.after[0] if batch.after else 0
        found: dict[bytes, Entry] = {}  # Redis may return an entry twice while it resizes the hash
        for _ in range(_MOST_PAGES):
            cursor, page = pending_uploads.page(cursor, self.batch_size, first_fresh)
            found |= {entry.field: entry for entry in page}
            if not cursor or len(found) >= self.batch_size:
                break
        return cursor, *classify(found.values(), first_fresh)

    def _delete(self, result: _Deleted, location: str, stale: Sequence[tuple[str, Entry]], batch: Batch) -> None:
        """Claim entries of a location, delete their objects, and remove the entries whose objects are gone."""
        assert self._claims is not None
        deletion = self._deletions.get(location)
        if deletion is None:
            deletion = self._deletions[location] = Deletion(stores.configured[location])
        new = [(path, entry) for path, entry in stale if entry.field not in self._failed]
        if deletion.unavailable is not None or not new:
            return
        taken = set(self._claims.take([entry for _, entry in new]))
        claimed = {path: entry for path, entry in new if entry in taken}
        if not claimed:
            return
        deleted = deletion.delete(list(claimed), batch.time_is_up, batch.check)
        gone = [claimed[path] for path in deleted.gone]
        kept = [claimed[path] for path in claimed.keys() - set(deleted.gone)]
        _store(gone, batch)
        ends = self._claims.finish(gone, kept)
        result.removed += ends.removed
        for path, refusal in deleted.refused.items():
            self._fail(result, claimed[path], refusal)
        for entry, change in ends.lost:
            self._fail(result, entry, change)
        if deletion.unavailable is None and len(deleted.gone) + len(deleted.refused) < len(claimed):
            result.complete = False

    def _fail(self, result: _Deleted, entry: Entry, error: BaseException) -> None:
        if entry.field in self._failed:
            return
        if len(self._failed) < _REMEMBERED:
            self._failed.add(entry.field)
        record = {"location": entry.location, "path": entry.path, "prepared_at": entry.value.decode(errors="replace")}
        result.failures.append(Failure(record, error))


def _store(gone: Sequence[Entry], batch: Batch) -> None:
    """Store the event before the entries are removed: without them no later run could send it."""
    if events.handlers_of(events.upload_deleted).outbox:
        with database.atomic():
            store_in_outbox(events.upload_deleted, _rows(gone), worker=batch.worker, run_id=batch.run_id, claimed=False)


def _rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [{"location": entry.location, "path": entry.path} for entry in entries]
