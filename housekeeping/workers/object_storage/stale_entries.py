"""Stale entries of the hash: the rule that finds them, and their number for plan, status and alerts."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from housekeeping.sweeps import Backlog, StagePlan, UploadRefused
from housekeeping.workers.object_storage import pending_uploads, stores
from housekeeping.workers.object_storage.pending_entry import Entry, epoch_seconds
from housekeeping.workers.object_storage.stores import ObjectStore

_PAGE: Final = 5000  # entries per round trip
_SAMPLES: Final = 5


@dataclass(slots=True)
class StaleEntries:
    """The entries of a page that a run acts on.

    Attributes:
      by_location: Location -> the entries whose objects are to be deleted.
      refused: Entries that cannot be processed, each with the reason. They stay in the hash.
    """

    by_location: dict[str, list[Entry]] = field(default_factory=dict)
    refused: list[tuple[Entry, UploadRefused]] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        """The stale entries of all locations."""
        return [entry for entries in self.by_location.values() for entry in entries]


def stale_before(now: datetime, stale_after: timedelta) -> float:
    """Return the epoch second before which an upload must have been prepared to be stale.

    Whole seconds; an upload of exactly that age is not stale (document 100, 処理フロー: stale?, a strict comparison).
    """
    return int(now.timestamp()) - stale_after.total_seconds()


def classify(page: Mapping[bytes, bytes], first_fresh: float, stores: Mapping[str, ObjectStore]) -> StaleEntries:
    """Return the stale entries of a page, given the first second that is not stale.

    Entries of a disabled store are ignored, whatever they contain.
    """
    found = StaleEntries()
    for name, value in page.items():
        prepared_at = epoch_seconds(value)
        if prepared_at is not None and prepared_at >= first_fresh:
            continue
        entry = Entry(name, value)
        store = stores.get(entry.location)
        if store is not None and not store.enabled:
            continue
        try:
            entry.refuse_unusable()
            if store is None:
                raise UploadRefused(f"HOUSEKEEPING_OBJECT_STORES has no location {entry.location!r}")
        except UploadRefused as error:
            found.refused.append((entry, error))
        else:
            found.by_location.setdefault(store.location, []).append(entry)
    return found


def backlog(now: datetime, stale_after: timedelta, limit: int) -> Backlog:
    """Count the stale uploads, without those of disabled stores.

    Note: The hash has no index, so all of it is read unless more than `limit` are found.
    """
    stale = 0
    for page in _pages(now, stale_after):
        stale += len(page.entries)
        if stale > limit:
            return Backlog(limit, exact=False)
    return Backlog(stale)


def oldest(now: datetime, stale_after: timedelta) -> datetime | None:
    """Return when the oldest stale upload was prepared, or None if no upload is stale."""
    times = (_prepared_at(entry) for page in _pages(now, stale_after) for entry in page.entries)
    return min(times, default=None)


def plan(name: str, now: datetime, stale_after: timedelta, limit: int) -> StagePlan:
    """Return what a run would delete; the stores are not contacted."""
    stale = refused = 0
    first: list[tuple[datetime, str, str]] = []
    newest: datetime | None = None
    for page in _pages(now, stale_after):
        refused += len(page.refused)
        found = [(_prepared_at(entry), entry.location, entry.path) for entry in page.entries]
        stale += len(found)
        first = heapq.nsmallest(_SAMPLES, [*first, *found])
        last = max(found, default=None)
        newest = last[0] if last and (newest is None or last[0] > newest) else newest
    counted = min(stale, limit)
    return StagePlan(
        name,
        Backlog(counted, stale <= limit),
        {
            "total_pending_entries": pending_uploads.count(),
            "total_deleted_stale_entries": counted,
            "failed": refused,
        },
        oldest=first[0][0] if first else None,
        newest=newest,
        samples=[
            {"location": location, "path": path, "prepared_at": time.isoformat()} for time, location, path in first
        ],
    )


def _pages(now: datetime, stale_after: timedelta) -> Iterator[StaleEntries]:
    first_fresh = stale_before(now, stale_after)
    return (classify(page, first_fresh, stores.configured) for page in pending_uploads.pages(_PAGE, first_fresh))


def _prepared_at(entry: Entry) -> datetime:
    seconds = epoch_seconds(entry.value)
    assert seconds is not None, "a stale entry has a time"
    return datetime.fromtimestamp(seconds, UTC)
