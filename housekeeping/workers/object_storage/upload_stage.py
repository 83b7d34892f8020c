"""The pass through the hash of pending uploads: a page, the objects of its stale entries, and those entries."""

from __future__ import annotations

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
    store_in_outbox,
)
from housekeeping.sweeps import logger as named_logger
from housekeeping.workers.object_storage import pending_uploads, stale_entries, stores
from housekeeping.workers.object_storage.claims import Claims
from housekeeping.workers.object_storage.deletion import Deletion
from housekeeping.workers.object_storage.pending_entry import Entry

logger = named_logger(__name__)

#: Entries that are claimed, deleted and removed together: what S3 deletes in a request. Lua's stack has room for 8000.
_TOGETHER: Final = 1000
#: Added to the longest run, and then its claims are free for others whatever the ledger says: its last request, and
#: what a machine stands still.
_GRACE: Final = timedelta(minutes=2)
#: What failed is not tried again in the same run; when there are more than this, one may be counted twice.
_REMEMBERED: Final = 100_000


@dataclass(slots=True)
class _Taken:
    """What a step did outside of the database.

    Attributes:
      total: How many entries there are in all; null but in the first step of a run.
      cursor: Where the next page begins; 0: there is none.
      complete: Whether there was time for everything on this page.
      from_front: Whether the front comes after this page: a resumed run has not seen the entries before its beginning.
    """

    total: int | None = None
    cursor: int = 0
    complete: bool = True
    from_front: bool = False
    removed: list[Entry] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


class PendingUploadsStage:
    """One walk through the hash; made anew for each run.

    Parameters:
      batch_size: Entries a page, about.
      stale_after: An upload is stale when it was prepared more than this ago, in whole seconds.
      longest: How long a run takes new work.
      log_records: Whether each deletion has a line of its own.
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
        """This very pass, because it knows what the run has claimed and what has failed."""
        self.batch_size = batch_size
        return self

    def prepare(self, batch: Batch) -> _Taken:
        """Read a page and settle what is stale on it, as far as time and stores allow.

        Raises:
          RedisUnavailable: Objects may be gone whose entries still stand; a later run finds them missing, and goes on.
        """
        prepared = _Taken()
        if self._claims is None:
            self._resumed = batch.after is not None
            prepared.total = pending_uploads.count()
            self._claims = Claims(self._longest + _GRACE, batch.run_id, lambda: at_work(batch.worker))
        first_fresh = stale_entries.stale_before(batch.now, self._stale_after)
        prepared.cursor, page = pending_uploads.page(batch.after[0] if batch.after else 0, self.batch_size, first_fresh)
        found = stale_entries.classify(page, first_fresh, stores.configured)
        for entry, error in found.refused:
            self._fail(prepared, entry, error)
        chosen = _first(found.by_location, batch.most)
        parts = [
            (location, entries[start : start + _TOGETHER])
            for location, entries in chosen.items()
            for start in range(0, len(entries), _TOGETHER)
        ]
        for number, (location, entries) in enumerate(parts, 1):
            try:
                self._delete(prepared, location, entries, batch)
            except RedisUnavailable:
                if not (prepared.removed or prepared.failures):
                    raise
                # What is removed is counted first; the next step meets the same error.
                prepared.complete = False
                break
            if number < len(parts) and (not prepared.complete or batch.time_is_up()):
                prepared.complete = False
                break
        if prepared.removed and sum(map(len, chosen.values())) < len(found.entries):
            prepared.complete = False  # the breaker's limit ends within this page
        if self._resumed and prepared.complete and not prepared.cursor:
            # Redis gives entries in no order, so the second way goes through all of them.
            prepared.from_front, self._resumed = True, False
        return prepared

    def apply(self, batch: Batch, prepared: _Taken) -> BatchResult:
        """Nothing of its own: the engine counts what was done, in the run's row."""
        following = (prepared.cursor,) if prepared.cursor or prepared.from_front else None
        counts = {"total_deleted_stale_entries": len(prepared.removed)}
        if prepared.total is not None:
            counts["total_pending_entries"] = prepared.total
        return BatchResult(
            counts,
            # Time was up in the middle of the page: the next run begins with it.
            following if prepared.complete else batch.after,
            exhausted=prepared.complete and following is None,
            rows=_rows(prepared.removed),
            failures=prepared.failures,
            unreachable=self._unreachable(),
        )

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        if self._log_records:
            for row in result.rows:
                logger.info("Stale upload deleted", **row)

    def announcements(self, result: BatchResult) -> Sequence[Announcement]:
        return [Announcement(events.upload_deleted, result.rows, in_outbox=True)]

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        return stale_entries.backlog(now, self._stale_after, limit)

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        return stale_entries.oldest(now, self._stale_after)

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        return stale_entries.plan(self.name, now, self._stale_after, limit)

    def _delete(self, prepared: _Taken, location: str, stale: Sequence[Entry], batch: Batch) -> None:
        """Claim some entries of a location, delete their objects, remove the entries whose objects are gone."""
        assert self._claims is not None
        deletion = self._deletions.get(location)
        if deletion is None:
            deletion = self._deletions[location] = Deletion(stores.configured[location])
        new = [entry for entry in stale if hash(entry.field) not in self._failed]
        if deletion.away is not None or not new:
            return
        # Redis shows a page in the same order each time: where time runs out among objects that are slow to be
        # refused, those behind them would never have their turn.
        random.shuffle(new)
        claimed = {entry.path: entry for entry in self._claims.take(new)}
        if not claimed:
            return
        deleted = deletion.delete(list(claimed), batch.time_is_up, batch.check)
        are_gone = set(deleted.gone)
        gone = [claimed[path] for path in deleted.gone]
        kept = [entry for path, entry in claimed.items() if path not in are_gone]
        _store(gone, batch)
        ends = self._claims.settle(gone, kept)
        prepared.removed += ends.removed
        for path, refusal in deleted.refused.items():
            self._fail(prepared, claimed[path], refusal)
        for entry, change in ends.lost:
            self._fail(prepared, entry, change)
        if deletion.away is None and len(deleted.gone) + len(deleted.refused) < len(claimed):
            prepared.complete = False

    def _fail(self, prepared: _Taken, entry: Entry, error: BaseException) -> None:
        known_as = hash(entry.field)
        if known_as in self._failed:
            return
        if len(self._failed) < _REMEMBERED:
            self._failed.add(known_as)
        record = {"location": entry.location, "path": entry.path, "prepared_at": entry.value.decode(errors="replace")}
        prepared.failures.append(Failure(record, error))

    def _unreachable(self) -> ObjectStoreUnavailable | None:
        away = [deletion.away for deletion in self._deletions.values() if deletion.away is not None]
        return ObjectStoreUnavailable("; ".join(map(str, away))) if away else None


def _first(stale: dict[str, list[Entry]], most: int | None) -> dict[str, list[Entry]]:
    """The first entries of a page, as many as the breaker still allows."""
    if most is None:
        return stale
    first: dict[str, list[Entry]] = {}
    for location, entries in stale.items():
        first[location] = entries[: max(0, most - sum(map(len, first.values())))]
    return first


def _store(gone: Sequence[Entry], batch: Batch) -> None:
    """Store the event before the entries are removed, by which alone a later run would know of these uploads."""
    if events.handlers_of(events.upload_deleted).outbox:
        with database.atomic():
            store_in_outbox(events.upload_deleted, _rows(gone), worker=batch.worker, run_id=batch.run_id, claimed=False)


def _rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [{"location": entry.location, "path": entry.path} for entry in entries]
