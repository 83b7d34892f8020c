"""How fast stale records arrive and are settled, by what the last runs left behind."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.limits.breaker import processed_rows

_RUNS: Final = 50  # looked at; fewer say too little, more are too old to tell of now
_WELL: Final = ("done", "partial")
#: Runs over less time than this are no measure of an hour.
_OBSERVED_AT_LEAST: Final = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Ended:
    """One run that ended, for trends.

    Attributes:
      settled: Records taken from what was stale.
      backlog: What waited at its end; null: not counted.
    """

    run_id: int
    outcome: str
    reason: str | None
    started_at: datetime
    finished_at: datetime
    settled: int
    backlog: int | None
    backlog_exact: bool | None


@dataclass(frozen=True, slots=True)
class Rates:
    """Records an hour, over the last runs.

    Attributes:
      drained: BatchResult.
      arrived: Become stale; null: a backlog was only counted up to its limit, so nobody knows.
    """

    drained: float
    arrived: float | None


def last_ended(sweep: Sweep, number: int = _RUNS) -> list[Ended]:
    """The worker's last runs that began and ended, oldest first."""
    ended = (Run.worker == sweep.name) & Run.outcome.is_null(False) & Run.outcome.not_in(("skipped", "missed"))
    rows: Any = Run.select().where(ended).order_by(Run.id.desc()).limit(number)
    return [_read(sweep, row) for row in reversed(list(rows))]


def rates(runs: list[Ended]) -> Rates | None:
    """Return arrival and drain over these runs; None when they are too few, or within less than ten minutes."""
    counted = [run for run in runs if run.backlog is not None]
    if len(counted) < 2:
        return None
    first, last = counted[0], counted[-1]
    observed = last.finished_at - first.finished_at
    if observed < _OBSERVED_AT_LEAST:
        return None
    hours = observed / timedelta(hours=1)
    drained = sum(run.settled for run in runs if first.finished_at < run.finished_at <= last.finished_at)
    assert first.backlog is not None and last.backlog is not None
    known = first.backlog_exact and last.backlog_exact
    return Rates(drained / hours, (drained + last.backlog - first.backlog) / hours if known else None)


def pace(runs: list[Ended]) -> float | None:
    """Records settled in a second of work, over those of the runs that ended well; None when they settled none."""
    well = [run for run in runs if run.outcome in _WELL]
    settled = sum(run.settled for run in well)
    spent_s = sum((run.finished_at - run.started_at).total_seconds() for run in well)
    return settled / spent_s if settled and spent_s > 0 else None


def _read(sweep: Sweep, row: Any) -> Ended:
    return Ended(
        row.id,
        row.outcome,
        row.reason,
        row.started_at,
        row.finished_at,
        processed_rows(row.counts, sweep.progress_counts),
        row.backlog,
        row.backlog_exact,
    )
