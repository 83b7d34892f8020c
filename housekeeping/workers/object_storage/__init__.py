"""Deletes the objects and entries of direct uploads that were prepared and never completed.

============  =====================================================================
Source        Batch design document 100, ``ObjectStorage::DeleteStaleDirectUploadsWorker``
Runs          Every 6 minutes; an upload is stale after 3 h
Touches       Redis ``pending_direct_uploads`` and the objects its entries name (delete)
Limits        1000 entries per page, 250 s per run; the next run resumes there
Concurrency   Safe: each entry is claimed before its object is deleted
On failure    Retried up to 25 times; an unavailable store does not hold up the others
============  =====================================================================

`PendingUploadsStage` reads pages of the hash of pending uploads, deletes the objects of stale entries, and removes
those entries.
"""

from __future__ import annotations

import heapq
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from housekeeping import (
    Alerts,
    Announcement,
    Backlog,
    Batch,
    BatchResult,
    ClockSkew,
    Failure,
    Finding,
    Guard,
    Limits,
    ObjectStoreUnavailable,
    RedisUnavailable,
    StagePlan,
    Sweep,
    UploadRefused,
    at_work,
    current_database,
    events,
    log_rows,
    read_redis_clock,
    store_in_outbox,
)
from housekeeping.workers.object_storage import pending_uploads, stores
from housekeeping.workers.object_storage.pending_uploads import Claims, Entry
from housekeeping.workers.object_storage.stores import StoreDeletion


def classify(entries: Iterable[Entry], first_fresh: int) -> tuple[list[Entry], list[tuple[Entry, UploadRefused]]]:
    """Return the stale entries, and those that cannot be processed, which stay in the hash.

    Entries of a disabled store are ignored, whatever they contain.

    Parameters:
      first_fresh: The first second that is not stale.
    """
    stale: list[Entry] = []
    refused: list[tuple[Entry, UploadRefused]] = []
    for entry in entries:
        store, seconds = stores.configured.get(entry.location), entry.seconds
        if seconds is not None and seconds >= first_fresh or store is not None and not store.enabled:
            continue
        try:
            entry.refuse_unusable()
            if store is None:
                raise UploadRefused(f"HOUSEKEEPING_OBJECT_STORES has no location {entry.location!r}")
        except UploadRefused as error:
            refused.append((entry, error))
        else:
            stale.append(entry)
    return stale, refused


#: Pages that a batch reads in search of stale entries; it takes about 50 ms. Usually most entries are fresh.
_MOST_PAGES: Final = 10
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
    """Stage that reads the Redis hash of pending uploads once and deletes the stale ones; created for each run.

    Parameters:
      batch_size: Approximate number of entries per page, and of stale entries per batch.
      stale_after: An upload is stale when it was prepared longer ago than this, in whole seconds.
      log_records: Whether to log each deletion.
    """

    name: Final = "pending_direct_uploads"
    needs_redis: Final = "pending uploads are in Redis"
    counts: Final = ("total_pending_entries", "total_deleted_stale_entries", "execution_timeout", "failed")
    progress_counts: Final = ("total_deleted_stale_entries",)

    def __init__(self, batch_size: int, stale_after: timedelta, log_records: bool = False) -> None:
        self.batch_size = batch_size
        self._stale_after = stale_after
        self._log_records = log_records
        self._claims: Claims | None = None
        self._deletions: dict[str, StoreDeletion] = {}
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
            self._claims = Claims(batch.run_id or 0, lambda: at_work(batch.worker))
        known_failures = len(self._failed)
        result.cursor, stale, refused = self._read(batch)
        for entry, error in refused:
            self._fail(result, entry, error)
        # Entries that failed in this run are not chosen again, so that the next batch gets other ones.
        stale = [entry for entry in stale if entry.field not in self._failed]
        most = len(stale) if batch.most is None else max(0, batch.most)
        for number, (deletion, entries) in enumerate(self._groups(stale, most)):
            if number and batch.time_is_up():
                result.complete = False
                break
            try:
                self._delete(result, deletion, entries, batch)
            except RedisUnavailable:
                if not (result.removed or result.failures):
                    raise
                # Count what was removed. The next batch gets the same error.
                result.complete = False
                break
        if (result.removed or len(self._failed) > known_failures) and most < len(stale):
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
            number += len(stale)
            if number > limit:
                return Backlog(limit, exact=False)
        return Backlog(number)

    def oldest(self, now: datetime, argument: Any = None) -> datetime | None:
        """Return when the oldest stale upload was prepared, or None if no upload is stale."""
        return min((entry.prepared_at for stale, _ in self._pages(now) for entry in stale), default=None)

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        """Return what a run would delete; the stores are not contacted."""
        number = failed = 0
        oldest: list[Entry] = []
        newest: datetime | None = None
        for stale, refused in self._pages(now):
            failed += len(refused)
            number += len(stale)
            oldest = heapq.nsmallest(_SAMPLES, [*oldest, *stale], key=lambda entry: (entry.prepared_at, entry.field))
            newest = max((entry.prepared_at for entry in stale), default=newest)
        counted = min(number, limit)
        return StagePlan(
            self.name,
            Backlog(counted, number <= limit),
            {
                "total_pending_entries": pending_uploads.count(),
                "total_deleted_stale_entries": counted,
                "failed": failed,
            },
            oldest=oldest[0].prepared_at if oldest else None,
            newest=newest,
            samples=[
                {"location": entry.location, "path": entry.path, "prepared_at": entry.prepared_at.isoformat()}
                for entry in oldest
            ],
        )

    def clock_skew(self) -> ClockSkew:
        """Compare this machine's clock with that of Redis, which dates the uploads."""
        return read_redis_clock()

    def _first_fresh(self, now: datetime) -> int:
        # A forced run on a Redis whose clock is behind must not take fresh uploads for stale ones.
        now = min(now, pending_uploads.now())
        # Whole seconds; an upload of exactly that age is not stale (document 100, 処理フロー: stale?, strictly).
        return int(now.timestamp()) - int(self._stale_after.total_seconds())

    def _pages(self, now: datetime) -> Iterator[tuple[list[Entry], list[tuple[Entry, UploadRefused]]]]:
        first_fresh = self._first_fresh(now)
        return (classify(page, first_fresh) for page in pending_uploads.pages(first_fresh))

    def _read(self, batch: Batch) -> tuple[int, list[Entry], list[tuple[Entry, UploadRefused]]]:
        """Read the next pages. Return the cursor after them, the stale entries, and those that cannot be processed."""
        first_fresh, cursor = self._first_fresh(batch.now), batch.after[0] if batch.after else 0
        found: dict[bytes, Entry] = {}  # Redis may return an entry twice while it resizes the hash
        for _ in range(_MOST_PAGES):
            cursor, page = pending_uploads.page(cursor, self.batch_size, first_fresh)
            found |= {entry.field: entry for entry in page}
            if not cursor or len(found) >= self.batch_size:
                break
        return cursor, *classify(found.values(), first_fresh)

    def _groups(self, stale: Sequence[Entry], most: int) -> Iterator[tuple[StoreDeletion, Sequence[Entry]]]:
        """Yield up to `most` entries in random order, in groups that their store deletes at once while it is available.

        Redis returns a page in the same order each time. If a slow store or slow failures use up the time, what comes
        after them would never be reached.
        """
        by_location: dict[str, list[Entry]] = {}
        for entry in random.sample(stale, len(stale)):
            by_location.setdefault(entry.location, []).append(entry)
        for location in random.sample(list(by_location), len(by_location)):
            left = by_location[location][:most]
            most -= len(left)
            if left and location not in self._deletions:
                self._deletions[location] = StoreDeletion(stores.configured[location])
            while left and self._deletions[location].unavailable is None:
                size = self._deletions[location].at_once
                yield self._deletions[location], left[:size]
                left = left[size:]

    def _delete(self, result: _Deleted, deletion: StoreDeletion, entries: Sequence[Entry], batch: Batch) -> None:
        """Claim entries, delete their objects, and remove the entries whose objects are gone."""
        assert self._claims is not None
        claimed = {entry.path: entry for entry in self._claims.take(entries)}
        if not claimed:
            return
        batch.check()
        deleted = deletion.delete(list(claimed))
        gone = [claimed[path] for path in deleted.gone]
        _store(gone, batch)
        ends = self._claims.finish(gone)
        result.removed += ends.removed
        for path, refusal in deleted.refused.items():
            self._fail(result, claimed[path], refusal)
        for entry, change in ends.lost:
            self._fail(result, entry, change)

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
        with current_database.atomic():
            store_in_outbox(events.upload_deleted, _rows(gone), worker=batch.worker, run_id=batch.run_id, claimed=False)


def _rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [{"location": entry.location, "path": entry.path} for entry in entries]


#: This worker uses no table of the application: pending uploads live in Redis.
MODELS: Final[dict[str, Any]] = {}
RIGHTS: Final[dict[str, tuple[str, ...]]] = {}

SCHEDULE: Final = "*/6 * * * *"  # document 100, 実行スケジュール
MAX_EXEC_DURATION: Final = timedelta(seconds=250)  # document 100, 備考
STALE_AFTER: Final = timedelta(hours=3)  # docs/workers/object_storage.md; document 100, 備考: "a certain time"
PAGE: Final = 1000  # entries per page; docs/workers/object_storage.md
LONGEST_RUN: Final = timedelta(seconds=250)  # document 100, 監視・アラート
FAILED_RUNS: Final = 3  # in a row; document 100, 監視・アラート: 連続失敗, without a number
LATE: Final = timedelta(days=1)  # 240 runs; no document has a number
LARGEST_BACKLOG: Final = 10_000  # stale entries left by a run; document 100, 監視・アラート: 大量蓄積, without a number

configure = stores.configure

sweep: Final = Sweep(
    "object_storage.delete_stale_direct_uploads",
    lambda sweep: PendingUploadsStage(
        sweep.limits.batch,
        timedelta(seconds=sweep.options["stale_after_s"]),
        log_records=sweep.options["log_records"],
    ),
    schedule=SCHEDULE,
    # Document 100, エラー処理: after a time-out the next run continues. If it started at the
    # front, slow failures there would keep the rest waiting for ever.
    limits=Limits(PAGE, MAX_EXEC_DURATION, resume="after_limit", batch_takes=None),
    guard=Guard(first_run=False),
    alerts=Alerts(longest_run=LONGEST_RUN, backlog=LARGEST_BACKLOG, failed_runs=FAILED_RUNS, late=LATE),
    options={"stale_after_s": STALE_AFTER.total_seconds(), "log_records": False},
    actor={"feature_category": "job_artifacts", "data_consistency": "sticky", "deduplicate": "until_executed"},
)

SWEEPS: Final = (sweep,)


def unconfigured() -> str | None:
    """Return the missing setting, or None when a store is configured."""
    return None if stores.configured else "HOUSEKEEPING_OBJECT_STORES is not set"


def examine() -> Iterator[Finding]:
    """Check that each enabled object store can be reached and listed, for `housekeeping doctor`."""
    if not stores.configured:
        yield Finding(
            "warning", sweep.name, "object stores", "none is set: every entry is refused", "HOUSEKEEPING_OBJECT_STORES"
        )
    for location, configured in stores.configured.items():
        if not configured.enabled:
            yield Finding("fine", sweep.name, f"object store {location}", "is switched off")
            continue
        try:
            configured.check_access()
            yield Finding("fine", sweep.name, f"object store {location}", "can be listed")
        except ObjectStoreUnavailable as error:
            yield Finding(
                "error",
                sweep.name,
                f"object store {location}",
                str(error),
                "repair what the error names, or switch it off: enabled false",
            )
