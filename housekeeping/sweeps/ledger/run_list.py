"""Pages of past runs, newest first, of one or all databases, with filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from peewee import Expression, Tuple

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import DatabaseUnavailable
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.database.time_limit import LOCK_TIME, STATEMENT_TIME, time_limit
from housekeeping.sweeps.ledger.history import RunRecord, record_of, select_runs
from housekeeping.sweeps.ledger.models import Run

#: Filter value of `RunFilter.outcome` for open runs.
RUNNING: Final = "running"


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Conditions that a run meets; None for any.

    Attributes:
      outcome: Its outcome; `RUNNING` for open runs.
      since: It began at this time or later.
      until: It began before this time.
    """

    worker: str | None = None
    outcome: str | None = None
    trigger: str | None = None
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """Place of a run in the list of all databases; runs that began at the same time are ordered by database and id."""

    started_at: datetime
    database: str
    run_id: int

    @classmethod
    def of(cls, record: RunRecord) -> Position:
        """Return the position of this run."""
        return cls(record.started_at, record.database, record.run_id)


@dataclass(slots=True)
class RunPage:
    """One page of runs.

    Attributes:
      runs: Newest first.
      more: Whether older runs follow.
      unavailable: Why a database is missing.
      now: The time of a database that answered.
    """

    runs: Sequence[RunRecord] = ()
    more: bool = False
    unavailable: list[DatabaseUnavailable] = field(default_factory=list)
    now: datetime = field(default_factory=SYSTEM_CLOCK.now)


def read_page(
    names: Sequence[str], filter_at: Callable[[datetime], RunFilter], *, limit: int, before: Position | None = None
) -> RunPage:
    """Return the runs of these databases that meet the filter. A database that does not answer hides no other one.

    Parameters:
      filter_at: Returns the filter for a database's current time.
      before: Only runs after this position in the list, for the next page.
    """
    page, found = RunPage(), list[RunRecord]()
    for name in names:
        try:
            with database.using(name), translate_postgres_errors(), time_limit(STATEMENT_TIME, LOCK_TIME):
                page.now = database_now()
                found += _runs(filter_at(page.now), before, limit + 1)
        except DatabaseUnavailable as error:
            page.unavailable.append(error)
    found.sort(key=lambda run: (run.started_at, run.database, run.run_id), reverse=True)
    page.runs, page.more = found[:limit], len(found) > limit
    return page


def _runs(wanted: RunFilter, before: Position | None, limit: int) -> list[RunRecord]:
    conditions: list[Expression] = []
    if wanted.worker is not None:
        conditions.append(Run.worker == wanted.worker)
    if wanted.outcome is not None:
        conditions.append(Run.outcome.is_null() if wanted.outcome == RUNNING else Run.outcome == wanted.outcome)
    if wanted.trigger is not None:
        conditions.append(Run.trigger == wanted.trigger)
    if wanted.since is not None:
        conditions.append(Run.started_at >= wanted.since)
    if wanted.until is not None:
        conditions.append(Run.started_at < wanted.until)
    if before is not None:
        conditions.append(_after(before))
    query: Any = select_runs().order_by(Run.started_at.desc(), Run.id.desc()).limit(limit)
    return [record_of(run) for run in (query.where(*conditions) if conditions else query)]


def _after(position: Position) -> Expression:
    """Return the condition that a run of the current database comes after the position."""
    after: Expression
    if database.selected == position.database:
        after = Tuple(Run.started_at, Run.id) < Tuple(position.started_at, position.run_id)
    elif database.selected < position.database:
        after = Run.started_at <= position.started_at
    else:
        after = Run.started_at < position.started_at
    return after
