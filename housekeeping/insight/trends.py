"""Trends of the runs: outcomes, processed rows, durations and backlogs in intervals of equal length, for charts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, Literal

from peewee import SQL, Case, NodeList, Select, ValuesList, fn

from housekeeping.core.errors import DatabaseUnavailable
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, database, time_limit, translate_postgres_errors
from housekeeping.ledger.schema import Run
from housekeeping.sweeps.declaration import Sweep

Range = Literal["hour", "day", "week"]

#: Length of an interval of a chart, and the number of intervals.
INTERVALS: Final[dict[Range, tuple[timedelta, int]]] = {
    "hour": (timedelta(minutes=1), 60),
    "day": (timedelta(minutes=30), 48),
    "week": (timedelta(hours=3), 56),
}


@dataclass(slots=True)
class Interval:
    """The runs that began in one interval.

    Attributes:
      outcomes: Number of runs by outcome; ``running`` for open ones.
      rows: The rows that they processed.
      total_s: Sum of the durations of those that ended, in seconds.
      longest_s: The longest duration; None if none has ended.
      backlog: Sum of the workers' highest backlogs at the end of a run; a worker without a run keeps its last one.
        None if no backlog has been counted yet.
      backlog_exact: False if a backlog was counted only up to its limit.
    """

    began_at: datetime
    ended_at: datetime
    outcomes: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    total_s: float = 0.0
    longest_s: float | None = None
    backlog: int | None = None
    backlog_exact: bool = True

    @property
    def runs(self) -> int:
        """Number of runs."""
        return sum(self.outcomes.values())

    @property
    def mean_s(self) -> float | None:
        """Mean duration of the runs that ended, in seconds; None if none has ended. Skipped runs do not count."""
        ended = sum(number for outcome, number in self.outcomes.items() if outcome in _TIMED)
        return self.total_s / ended if ended else None


@dataclass(frozen=True, slots=True)
class Trends:
    """The intervals of a chart.

    Attributes:
      intervals: The oldest first.
      unavailable: Why a database is missing.
      at: The time in the last interval until which there are runs.
    """

    intervals: Sequence[Interval]
    unavailable: Sequence[DatabaseUnavailable]
    at: datetime


#: Outcomes of runs that began, so that they have a duration.
_TIMED: Final = ("done", "partial", "failed", "lost_lease", "lost")


def intervals(length: Range, now: datetime) -> list[Interval]:
    """Return the empty intervals of a chart; the last one contains `now`."""
    width, number = INTERVALS[length]
    end = datetime.fromtimestamp((now.timestamp() // width.total_seconds() + 1) * width.total_seconds(), UTC)
    return [Interval(end - left * width, end - (left - 1) * width) for left in range(number, 0, -1)]


def read_trends(
    names: Sequence[str], sweeps: Iterable[Sweep], length: Range, now: datetime, worker: str | None = None
) -> Trends:
    """Return the trends of the runs of these databases, with one query for each.

    Parameters:
      sweeps: The declared workers, which know what counts as a processed row.
      worker: Only its runs; None for all workers.
    """
    found, unavailable, declared = intervals(length, now), list[DatabaseUnavailable](), list(sweeps)
    backlogs: dict[tuple[str, str], dict[int, tuple[int, bool]]] = {}
    for name in names:
        try:
            with database.using(name), translate_postgres_errors(), time_limit(STATEMENT_TIME, LOCK_TIME):
                query = _query(found, [sweep for sweep in declared if sweep.database == name], worker)
                rows = database.execute(query).fetchall()
        except DatabaseUnavailable as error:
            unavailable.append(error)
            continue
        for place, of_worker, outcome, runs, processed, total_s, longest_s, backlog, exact in rows:
            _add(found[place], outcome, runs, processed, total_s, longest_s)
            if backlog is not None:
                highest = backlogs.setdefault((name, of_worker), {})
                highest[place] = max(highest.get(place, (0, True)), (backlog, bool(exact)))
    for of_one in backlogs.values():
        _add_backlogs(found, of_one)
    return Trends(found, unavailable, now)


def _query(found: Sequence[Interval], sweeps: Sequence[Sweep], worker: str | None) -> Any:
    """Return the query for the sums of each interval, worker and outcome.

    Each interval is read by itself, so that the runs come in the order of an index and need no sort.
    """
    values = [(place, each.began_at, each.ended_at) for place, each in enumerate(found)]
    given = ValuesList(values, columns=("place", "began_at", "ended_at"), alias="given")
    duration = Run.finished_at - Run.started_at  # next to nothing for skipped and missed ticks
    sums: dict[str, Any] = {
        "runs": fn.COUNT(Run.id),
        "processed": fn.SUM(_processed(sweeps)),
        "total_s": fn.DATE_PART("epoch", fn.SUM(duration)),
        "longest_s": fn.DATE_PART("epoch", fn.MAX(duration)),
        "backlog": fn.MAX(Run.backlog),
        "exact": fn.BOOL_AND(Run.backlog_exact),
    }
    wanted = (Run.started_at >= given.c.began_at) & (Run.started_at < given.c.ended_at)
    if worker is not None:
        wanted &= Run.worker == worker
    named = (each.alias(name) for name, each in sums.items())
    runs = Run.select(Run.worker, Run.outcome, *named).where(wanted).group_by(Run.worker, Run.outcome).alias("runs")
    columns = (runs.c[name] for name in ("worker", "outcome", *sums))
    return Select((given, NodeList((SQL("LATERAL"), runs))), (given.c.place, *columns)).bind(database)


def _processed(sweeps: Sequence[Sweep]) -> Any:
    """Return the SQL for the rows that a run processed, by the counts of its worker."""
    workers: dict[tuple[str, ...], list[str]] = {}
    for sweep in sweeps:
        if sweep.progress_counts:
            workers.setdefault(tuple(sweep.progress_counts), []).append(sweep.name)
    cases = [
        (Run.worker.in_(names), sum((_number(each) for each in counts[1:]), _number(counts[0])))
        for counts, names in workers.items()
    ]
    return Case(None, cases, 0) if cases else 0


def _number(count: str) -> Any:
    """Return the SQL for one of a run's counts; 0 if it is missing or no number."""
    value = fn.JSONB_EXTRACT_PATH(Run.counts, count)
    return Case(None, [(fn.JSONB_TYPEOF(value) == "number", value.cast("numeric"))], 0)


def _add(
    interval: Interval,
    outcome: str | None,
    runs: int,
    processed: Decimal | None,
    total_s: float | None,
    longest_s: float | None,
) -> None:
    name = outcome or "running"
    interval.outcomes[name] = interval.outcomes.get(name, 0) + runs
    interval.rows += int(processed or 0)
    interval.total_s += max(0.0, total_s or 0.0)
    if longest_s is not None and name in _TIMED:
        interval.longest_s = max(0.0, longest_s, interval.longest_s or 0.0)


def _add_backlogs(found: Sequence[Interval], highest: dict[int, tuple[int, bool]]) -> None:
    last: tuple[int, bool] | None = None
    for place, interval in enumerate(found):
        last = highest.get(place, last)
        if last is not None:
            interval.backlog = (interval.backlog or 0) + last[0]
            interval.backlog_exact &= last[1]
