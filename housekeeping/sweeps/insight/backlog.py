"""How much is waiting, over all passes of a sweep: by the very predicate of the run, and never more than a look."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stages.stage import Backlog

__all__ = ["Backlog", "backlog", "first_of", "oldest"]


def backlog(sweep: Sweep, now: datetime, limit: int) -> Backlog:
    """Count what is stale, looking at no more than `limit` records of each pass, and one."""
    waiting = Backlog(0)
    for each in sweep.stages_for_run():
        waiting += each.backlog(now, limit)
    return waiting if waiting.rows <= limit else Backlog(limit, exact=False)


def oldest(sweep: Sweep, now: datetime) -> Any:
    """What the oldest stale record is known by, usually its time (an index probe a pass); None when none is stale."""
    return first_of(each.oldest(now) for each in sweep.stages_for_run())


def first_of(values: Iterable[Any], least: Callable[[list[Any]], Any] = min) -> Any:
    """The least of what passes are known by, nulls left out; null when there is none.

    Passes in the order of other things, one of times and one of ids, cannot be compared: then the first one's.
    """
    there = [value for value in values if value is not None]
    return least([value for value in there if type(value) is type(there[0])]) if there else None
