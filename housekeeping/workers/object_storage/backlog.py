"""What waits in the hash, for plan, status and alarms: the whole of it page by page, nothing is changed."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from housekeeping.sweeps.stages.stage import Backlog, StagePlan
from housekeeping.workers.object_storage import pending_uploads, stores
from housekeeping.workers.object_storage.classification import Classified, classify, prepared_at, stale_before

_PAGE: Final = 5000  # entries a round trip
_SAMPLES: Final = 5


def backlog(now: datetime, stale_after: timedelta, limit: int) -> Backlog:
    """How many uploads are stale; those of stores that are switched off do not count.

    Note: The hash has no index, so all of it is read unless more than `limit` are found.
    """
    stale = 0
    for judged in _pages(now, stale_after):
        stale += len(judged.entries)
        if stale > limit:
            return Backlog(limit, exact=False)
    return Backlog(stale)


def oldest(now: datetime, stale_after: timedelta) -> datetime | None:
    """When the oldest stale upload was prepared; None when none is stale."""
    times = (prepared_at(entry) for judged in _pages(now, stale_after) for entry in judged.entries)
    return min(times, default=None)


def plan(name: str, now: datetime, stale_after: timedelta, limit: int) -> StagePlan:
    """What a run would do, by its own judgement of each entry; the stores themselves are not asked."""
    stale = refused = 0
    first: list[tuple[datetime, str, str]] = []
    newest: datetime | None = None
    for judged in _pages(now, stale_after):
        refused += len(judged.refused)
        found = [(prepared_at(entry), entry.location, entry.path) for entry in judged.entries]
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


def _pages(now: datetime, stale_after: timedelta) -> Iterator[Classified]:
    first_fresh = stale_before(now, stale_after)
    return (classify(page, first_fresh, stores.configured) for page in pending_uploads.pages(_PAGE, first_fresh))
