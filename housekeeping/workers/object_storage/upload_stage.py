"""Stage for the hash of pending uploads: read a page, delete the objects of stale entries, remove those entries."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
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
    at_work,
    database,
    log_rows,
    store_in_outbox,
)
from housekeeping.workers.object_storage import pending_uploads, stale_entries, stores
from housekeeping.workers.object_storage.claims import Claims
from housekeeping.workers.object_storage.deletion import Deletion
from housekeeping.workers.object_storage.pending_entry import Entry

#: Entries that are claimed, deleted and removed together: the limit of one S3 request. Lua's stack has room for 8000.
_TOGETHER: Final = 1000
#: Added to the longest run's time before its claims count as abandoned: time for the last request, and for a machine
#: that was suspended.
_GRACE: Final = timedelta(minutes=2)
#: Failed entries are not tried again in the same run. Beyond this number one may be counted twice.
_REMEMBERED: Final = 100_000


@dataclass(slots=True)
class _PageResult:
    """Results of a batch outside of the database.

    Attributes:
      total: Number of entries in the hash; None except in a run's first batch.
      cursor: Where the next page begins; 0 means that there is none.
      complete: Whether everything on this page was processed in time.
      from_front: Whether the run continues at the front: a resumed run has not read the entries before its start.
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
      batch_size: Approximate number of entries per page.
      stale_after: An upload is stale when it was prepared longer ago than this, in whole seconds.
      longest: Maximum time of a run.
      log_records: Whether to log each deletion.
    """

    name: Final = "pending_direct_uploads"

    def __init__(
        self,
        batch_size: int,
        stale_after: timedelta,
        longest: timedelta,
        log_records: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self._stale_after = stale_after
        self._longest = longest
        self._log_records = log_records
        self._claims: Claims | None = None
        self._deletions: dict[str, Deletion] = {}
        self._failed: set[int] = set()
        self._resumed = False

    def resized(self, batch_size: int) -> PendingUploadsStage:
        """Return this stage with another page size; it keeps the run's claims and failures."""
        self.batch_size = batch_size
        return self

    def prepare(self, batch: Batch) -> _PageResult:
        """Read a page and delete its stale uploads, as far as time and stores allow.

        Raises:
          RedisUnavailable: Entries may remain whose objects are gone. A later run finds the objects missing.
        """
        result = _PageResult()
        if self._claims is None:
            self._resumed = batch.after is not None
            result.total = pending_uploads.count()
            self._claims = Claims(self._longest + _GRACE, batch.run_id, lambda: at_work(batch.worker))
        first_fresh = stale_entries.stale_before(batch.now, self._stale_after)
        result.cursor, page = pending_uploads.page(batch.after[0] if batch.after else 0, self.batch_size, first_fresh)
        found = stale_entries.classify(page, first_fresh, stores.configured)
        for entry, error in found.refused:
            self._fail(result, entry, error)
        chosen = _first(found.by_location, batch.most)
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
        if result.removed and sum(map(len, chosen.values())) < len(found.entries):
            result.complete = False  # the breaker's limit ends within this page
        if self._resumed and result.complete and not result.cursor:
            # Redis returns entries in no order, so the second scan covers all of them.
            result.from_front, self._resumed = True, False
        return result

    def apply(self, batch: Batch, result: _PageResult) -> BatchResult:
        """Return the counts; the engine writes them to the run's row."""
        following = (result.cursor,) if result.cursor or result.from_front else None
        counts = {"total_deleted_stale_entries": len(result.removed)}
        if result.total is not None:
            counts["total_pending_entries"] = result.total
        return BatchResult(
            counts,
            # Time was up in the middle of the page: the next run begins with it.
            following if result.complete else batch.after,
            exhausted=result.complete and following is None,
            rows=_rows(result.removed),
            failures=result.failures,
            unreachable=self._unreachable(),
        )

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        if self._log_records:
            log_rows(__name__, logging.INFO, "Stale upload deleted", result.rows)

    def announcements(self, result: BatchResult) -> Sequence[Announcement]:
        return [Announcement(events.upload_deleted, result.rows, in_outbox=True)]

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        return stale_entries.backlog(now, self._stale_after, limit)

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        return stale_entries.oldest(now, self._stale_after)

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        return stale_entries.plan(self.name, now, self._stale_after, limit)

    def _delete(self, result: _PageResult, location: str, stale: Sequence[Entry], batch: Batch) -> None:
        """Claim entries of a location, delete their objects, and remove the entries whose objects are gone."""
        assert self._claims is not None
        deletion = self._deletions.get(location)
        if deletion is None:
            deletion = self._deletions[location] = Deletion(stores.configured[location])
        new = [entry for entry in stale if hash(entry.field) not in self._failed]
        if deletion.unavailable is not None or not new:
            return
        # Redis returns a page in the same order each time. If slow failures use up the time, entries after them
        # would never be reached.
        random.shuffle(new)
        claimed = {entry.path: entry for entry in self._claims.take(new)}
        if not claimed:
            return
        deleted = deletion.delete(list(claimed), batch.time_is_up, batch.check)
        gone_paths = set(deleted.gone)
        gone = [claimed[path] for path in deleted.gone]
        kept = [entry for path, entry in claimed.items() if path not in gone_paths]
        _store(gone, batch)
        ends = self._claims.settle(gone, kept)
        result.removed += ends.removed
        for path, refusal in deleted.refused.items():
            self._fail(result, claimed[path], refusal)
        for entry, change in ends.lost:
            self._fail(result, entry, change)
        if deletion.unavailable is None and len(deleted.gone) + len(deleted.refused) < len(claimed):
            result.complete = False

    def _fail(self, result: _PageResult, entry: Entry, error: BaseException) -> None:
        known_as = hash(entry.field)
        if known_as in self._failed:
            return
        if len(self._failed) < _REMEMBERED:
            self._failed.add(known_as)
        record = {"location": entry.location, "path": entry.path, "prepared_at": entry.value.decode(errors="replace")}
        result.failures.append(Failure(record, error))

    def _unreachable(self) -> ObjectStoreUnavailable | None:
        unavailable = [
            deletion.unavailable for deletion in self._deletions.values() if deletion.unavailable is not None
        ]
        return ObjectStoreUnavailable("; ".join(map(str, unavailable))) if unavailable else None


def _first(stale: dict[str, list[Entry]], most: int | None) -> dict[str, list[Entry]]:
    """Return the first entries of a page, as many as the breaker allows."""
    if most is None:
        return stale
    first: dict[str, list[Entry]] = {}
    for location, entries in stale.items():
        first[location] = entries[: max(0, most - sum(map(len, first.values())))]
    return first


def _store(gone: Sequence[Entry], batch: Batch) -> None:
    """Store the event before the entries are removed, because a later run knows of these uploads only by them."""
    if events.handlers_of(events.upload_deleted).outbox:
        with database.atomic():
            store_in_outbox(events.upload_deleted, _rows(gone), worker=batch.worker, run_id=batch.run_id, claimed=False)


def _rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [{"location": entry.location, "path": entry.path} for entry in entries]
