"""Backlog of a sweep, and the rates at which rows become stale and are processed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.limits.breaker import processed_rows
from housekeeping.sweeps.stages.stage import Backlog
from housekeeping.sweeps.stages.table_stage import TableStage

MOST_RUNS: Final = 50  # older runs say little about the current rate
_SUCCESS: Final = ("done", "partial")
#: A shorter observation gives no reliable rate per hour.
_MIN_OBSERVATION: Final = timedelta(minutes=10)


def backlog(sweep: Sweep, now: datetime, limit: int) -> Backlog:
    """Count the stale rows, at most `limit` and one of each stage."""
    waiting = Backlog(0)
    for each in sweep.stages_for_run():
        waiting += each.backlog(now, limit)
    return waiting if waiting.rows <= limit else Backlog(limit, exact=False)


def held(sweep: Sweep, now: datetime, limit: int) -> Backlog | None:
    """Count the rows on hold among the first `limit` stale rows of each stage; None if no stage has a hold."""
    return total_held(each.held(now, limit) for each in sweep.stages_for_run() if isinstance(each, TableStage))


def total_held(counts: Iterable[Backlog | None]) -> Backlog | None:
    """Return the sum of the stages' rows on hold; None if no stage has a hold."""
    found = [each for each in counts if each is not None]
    return sum(found, Backlog(0)) if found else None


def oldest(sweep: Sweep, now: datetime) -> Any:
    """Return the oldest stale row's first order column, usually its time; None without stale rows."""
    return first_of(each.oldest(now) for each in sweep.stages_for_run())


def first_of(values: Iterable[Any], least: Callable[[list[Any]], Any] = min) -> Any:
    """Return the least of the stages' values without None; None if there is none.

    Stages may be ordered by different types, such as times and ids. Then the type of the first value is compared.
    """
    present = [value for value in values if value is not None]
    return least([value for value in present if type(value) is type(present[0])]) if present else None


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that ended, for trends.

    Attributes:
      processed: The processed rows.
      backlog: The stale rows at its end; None if not counted.
    """

    run_id: int
    outcome: str
    reason: str | None
    started_at: datetime
    finished_at: datetime
    processed: int
    backlog: int | None
    backlog_exact: bool | None
    counts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rows per hour over the last runs.

    Attributes:
      drained: Processed rows.
      arrived: Rows that became stale; None if unknown, because a backlog was only counted up to its limit.
    """

    drained: float
    arrived: float | None


def last_ended(sweep: Sweep, number: int = MOST_RUNS) -> list[Ended]:
    """Return the worker's last runs that began and ended, oldest first."""
    ended = (Run.worker == sweep.name) & Run.outcome.is_null(False) & Run.outcome.not_in(("skipped", "missed"))
    columns = (Run.id, Run.outcome, Run.reason, Run.started_at, Run.finished_at, Run.counts, Run.backlog)
    rows: Any = Run.select(*columns, Run.backlog_exact).where(ended).order_by(Run.id.desc()).limit(number)
    return [_read(sweep, row) for row in reversed(list(rows))]


def rates(runs: list[Ended]) -> Rates | None:
    """Return the rates over these runs; None for fewer than two runs or less than ten minutes."""
    counted = [run for run in runs if run.backlog is not None]
    if len(counted) < 2:
        return None
    first, last = counted[0], counted[-1]
    observed = last.finished_at - first.finished_at
    if observed < _MIN_OBSERVATION:
        return None
    hours = observed / timedelta(hours=1)
    drained = sum(run.processed for run in runs if first.finished_at < run.finished_at <= last.finished_at)
    assert first.backlog is not None and last.backlog is not None
    known = first.backlog_exact and last.backlog_exact
    return Rates(drained / hours, (drained + last.backlog - first.backlog) / hours if known else None)


def pace(runs: list[Ended]) -> float | None:
    """Return the rows processed per second of run time in successful runs; None if they processed none."""
    succeeded = [run for run in runs if run.outcome in _SUCCESS]
    processed = sum(run.processed for run in succeeded)
    spent_s = sum((run.finished_at - run.started_at).total_seconds() for run in succeeded)
    return processed / spent_s if processed and spent_s > 0 else None


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
        row.counts,
    )
