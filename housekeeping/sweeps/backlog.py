"""How much is waiting: by the very predicate of the run, and never more than a bounded look."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from peewee import SQL, fn

from housekeeping.foundation.db import database
from housekeeping.sweeps.declaration import Sweep


@dataclass(frozen=True, slots=True)
class Backlog:
    """How many rows are stale.

    Attributes:
      rows: Their number, or `limit` when there are more.
      exact: Whether `rows` is all of them.
    """

    rows: int
    exact: bool

    def __str__(self) -> str:
        return f"{self.rows:,}" if self.exact else f"at least {self.rows:,}"


def backlog(sweep: Sweep, now: datetime, limit: int) -> Backlog:
    """Count the stale rows, looking at no more than `limit` of them and one."""
    stale = sweep.model.select(SQL("1")).where(sweep.stale(now)).limit(limit + 1)
    query: Any = stale.select_from(fn.COUNT(SQL("1")))
    rows: int = query.tuples().execute(database)[0][0]
    return Backlog(min(rows, limit), rows <= limit)


def oldest(sweep: Sweep, now: datetime) -> Any:
    """The first order column of the stale row that is first in order (one index probe); None when there is none."""
    first = sweep.order[0]
    row = sweep.model.select(first).where(sweep.stale(now)).order_by(*sweep.order).limit(1).tuples().first()
    return None if row is None else row[0]
