"""Backlog of a sweep over all its stages, by the same predicate as its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stages.stage import Backlog

__all__ = ["Backlog", "backlog", "first_of", "oldest"]


def backlog(sweep: Sweep, now: datetime, limit: int) -> Backlog:
    """Count the stale rows, at most `limit` and one of each stage."""
    waiting = Backlog(0)
    for each in sweep.stages_for_run():
        waiting += each.backlog(now, limit)
    return waiting if waiting.rows <= limit else Backlog(limit, exact=False)


def oldest(sweep: Sweep, now: datetime) -> Any:
    """Return the oldest stale row's first order column, usually its time; None without stale rows."""
    return first_of(each.oldest(now) for each in sweep.stages_for_run())


def first_of(values: Iterable[Any], least: Callable[[list[Any]], Any] = min) -> Any:
    """Return the least of the stages' values without None; None if there is none.

    Stages may be ordered by different types, such as times and ids. Then the type of the first value is compared.
    """
    present = [value for value in values if value is not None]
    return least([value for value in present if type(value) is type(present[0])]) if present else None
