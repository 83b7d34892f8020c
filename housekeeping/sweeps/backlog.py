"""How much is waiting, over all passes of a sweep: by the very predicate of the run, and never more than a look."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.passes import Backlog

__all__ = ["Backlog", "backlog", "oldest"]


def backlog(sweep: Sweep, now: datetime, limit: int) -> Backlog:
    """Count what is stale, looking at no more than `limit` records of each pass, and one."""
    waiting = Backlog(0)
    for each in sweep.walks():
        waiting += each.backlog(now, limit)
    return waiting if waiting.rows <= limit else Backlog(limit, exact=False)


def oldest(sweep: Sweep, now: datetime) -> Any:
    """What the oldest stale record is known by, usually its time (an index probe a pass); None when none is stale."""
    found = [value for each in sweep.walks() if (value := each.oldest(now)) is not None]
    return min(found) if found else None
