"""Trends of the runs: charts of what they have done, and the forecast of when a backlog will be done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, tzinfo
from decimal import Decimal
from math import ceil
from typing import Any, Final, Literal

from peewee import SQL, Case, NodeList, PeeweeException, Select, ValuesList, fn

from housekeeping.core.cron import Cron
from housekeeping.core.errors import DatabaseUnavailable
from housekeeping.core.logs import counted
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, database, time_limit, translate_postgres_errors
from housekeeping.database.errors import is_unavailable
from housekeeping.engine.alerts import pace, rates
from housekeeping.engine.guard import processed_rows
from housekeeping.ledger.history import RunRecord
from housekeeping.ledger.operators import Override
from housekeeping.ledger.schema import Run
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stage import Backlog
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.sweeps.validate_tables import stages_of

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


#: Runs that a forecast follows one by one. It extends their average beyond them.
_FOLLOWED: Final = 300
#: A forecast of a later time would say nothing.
_LATEST: Final = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class BacklogForecast:
    """When a worker's backlog will be done, if its runs process rows as fast as the last ones did.

    Attributes:
      rows: The stale rows.
      estimated: Whether `rows` is PostgreSQL's estimate, because there are more rows than were counted.
      done_at: When no row is left; None if never or unknown.
      runs: The runs that it takes, with the one that is at work; None if never or unknown.
      catches_up: False if more rows become stale than the runs can process; None if unknown.
      text: All of this in words.
    """

    rows: int
    estimated: bool
    text: str
    done_at: datetime | None = None
    runs: int | None = None
    catches_up: bool | None = None

    @property
    def is_notable(self) -> bool:
        """Whether it says more than that one run will process everything, or that there was no run yet."""
        return self.estimated or self.catches_up is False or (self.runs or 0) > 1


def forecast_backlog(
    sweep: Sweep,
    stale: Backlog,
    now: datetime,
    zone: tzinfo,
    *,
    ended: Sequence[RunRecord],
    override: Override | None = None,
    open_run: RunRecord | None = None,
) -> BacklogForecast | None:
    """Return when a worker's backlog will be done; None for a disabled worker.

    Parameters:
      stale: The stale rows, counted up to a limit. If there are more, PostgreSQL's planner estimates them.
      zone: Time zone of the schedule, and of the time in the text.
      ended: The worker's last runs, oldest first.
      override: What operators have set for the worker.
      open_run: Its newest run. It counts if it is at work.

    Raises:
      peewee.PeeweeException, DatabaseUnavailable: The database does not answer.
    """
    if not sweep.enabled:
        return None
    if not stale.rows:
        if stale.exact:
            return BacklogForecast(0, False, "nothing is stale", catches_up=True)
        return BacklogForecast(0, False, "the stale rows cannot be counted; when they will be done is unknown")
    rows, arrived = stale.rows, _arrived(sweep, ended)
    if not stale.exact:
        planned = _planned_rows(sweep, now)
        if planned is None:
            return BacklogForecast(rows, True, f"{stale} rows; when they will be done cannot be estimated")
        rows = max(rows, _rounded(planned))
        if arrived is None:
            # Runs process the oldest rows first, so those of the last hour are still there.
            before = _planned_rows(sweep, now - timedelta(hours=1))
            # A predicate without a time says nothing about them.
            arrived = None if before is None or before >= planned else float(planned - before)
    what, speed = f"{'' if stale.exact else 'about '}{counted(rows, 'row')}", pace(sweep, ended)
    if speed is None:
        text = f"{what}; when they will be done is unknown, because no run has processed rows yet"
        return BacklogForecast(rows, not stale.exact, text)
    limits = _Limits.of(sweep, speed, override, ended)
    course = _follow(rows, now, _starts(sweep, now, zone, override, open_run), limits, (arrived or 0.0) / 3600)
    after = f"after {counted(course.runs, 'run')}{', if no further rows become stale' if arrived is None else ''}"
    known = BacklogForecast(rows, not stale.exact, "", None, course.runs, catches_up=True)
    if course.done_at is None:
        drained = course.processed / max(1.0, (course.at - now).total_seconds()) * 3600
        text = (
            f"{what}, and it will never catch up: {_rounded(arrived or 0.0):,} rows an hour become stale, and its runs "
            f"process at most {_rounded(drained):,}; {limits.advice(sweep, (arrived or 0.0) / 3600)}"
        )
        return replace(known, text=text, runs=None, catches_up=False)
    if override is not None and override.state == "paused" and override.until is None:
        return replace(known, text=f"{what}, not done before it is resumed, and then {after}")
    if sweep.schedule is None:
        return replace(known, text=f"{what}, done {after}; it has no schedule")
    if course.done_at - now > _LATEST:
        return replace(known, text=f"{what}, not done within a year; {limits.advice(sweep, 0.0)}")
    local = course.done_at.astimezone(zone)
    form = "%H:%M" if local.date() == now.astimezone(zone).date() else "%Y-%m-%d %H:%M"
    return replace(known, text=f"{what}, done at about {local:{form}} {zone}, {after}", done_at=course.done_at)


@dataclass(frozen=True, slots=True)
class _Limits:
    """How fast and how long runs of a worker work.

    Attributes:
      own: Rows per second, and seconds of a run.
      narrowed: The same while the worker is narrowed.
      until: When that ends; None if it stays.
    """

    own: tuple[float, float]
    narrowed: tuple[float, float]
    until: datetime | None

    @classmethod
    def of(cls, sweep: Sweep, speed: float, override: Override | None, ended: Sequence[RunRecord]) -> _Limits:
        most, runtime_s = sweep.limits.rows_per_s, sweep.limits.runtime.total_seconds()
        speed = speed if most is None else min(speed, most)
        own = speed, runtime_s
        if override is None or override.state != "narrow":
            return cls(own, own, None)
        if override.max_runtime is not None:
            runtime_s = min(runtime_s, override.max_runtime.total_seconds())
        if override.rows_per_s is not None:
            speed = min(speed, override.rows_per_s)
        if override.batch_size is not None:
            since = [run for run in ended if override.since is not None and run.started_at >= override.since]
            # Before the first narrowed run: at worst, a batch of fewer rows takes as long as a full one.
            slower = speed * min(1.0, override.batch_size / max(sweep.limits.batch, *_rows_of_a_batch(sweep, ended)))
            speed = min(speed, pace(sweep, since) or slower)
        return cls(own, (speed, runtime_s), override.until)

    def at(self, start: datetime) -> tuple[float, float]:
        """Return rows per second and seconds of a run that starts then."""
        return self.own if self.until is not None and start >= self.until else self.narrowed

    def advice(self, sweep: Sweep, arrived_per_s: float) -> str:
        """Return what to change so that the worker catches up."""
        if self.narrowed != self.own:
            return f"end its narrowing: housekeeping resume {sweep.name}"
        if sweep.limits.rows_per_s is not None and self.own[0] >= sweep.limits.rows_per_s:
            return "raise max_rows_per_s"
        if self.own[0] <= arrived_per_s:
            return "raise batch_size" + (", or lower rest" if sweep.limits.rest else "")
        return "raise max_runtime_s, or schedule it more often"


def _rows_of_a_batch(sweep: Sweep, ended: Sequence[RunRecord]) -> list[float]:
    """Return the average rows of a batch of each run, so 0 at least once."""
    found = [(processed_rows(run.counts, sweep.progress_counts), run.counts.get("batches")) for run in ended]
    return [0.0, *(rows / batches for rows, batches in found if batches)]


@dataclass(frozen=True, slots=True)
class _Course:
    """What runs to come do, followed for some time.

    Attributes:
      at: The time until which they were followed.
      processed: The rows that they process until then.
      runs: How many they are until nothing is left.
      done_at: When nothing is left; None if never.
    """

    at: datetime
    processed: float
    runs: int
    done_at: datetime | None


def _starts(
    sweep: Sweep, now: datetime, zone: tzinfo, override: Override | None, open_run: RunRecord | None
) -> Iterator[tuple[datetime, float]]:
    """Yield the times at which runs can start, each with the seconds that this run has worked already."""
    begin = now
    if override is not None and override.state == "paused":
        begin = override.until or now
    elif open_run is not None and open_run.outcome is None and not open_run.is_silent:
        yield now, (now - open_run.started_at).total_seconds()
    if sweep.schedule is None:
        yield from ((begin + number * sweep.limits.runtime, 0.0) for number in range(_FOLLOWED))
    else:
        yield from ((tick, 0.0) for tick in Cron(sweep.schedule, zone).ticks(begin, begin + _LATEST))


def _follow(
    rows: int, now: datetime, starts: Iterable[tuple[datetime, float]], limits: _Limits, arrived_per_s: float
) -> _Course:
    left, at, processed, runs = float(rows), now, 0.0, 0
    for start, worked_s in starts:
        if start < at:  # this tick is skipped: the run before it is at work
            continue
        per_s, runtime_s = limits.at(start)
        left += arrived_per_s * (start - at).total_seconds()
        gain_per_s, spent_s = per_s - arrived_per_s, max(0.0, runtime_s - worked_s)
        if gain_per_s > 0:
            spent_s = min(spent_s, left / gain_per_s)
        left, processed, runs = left - gain_per_s * spent_s, processed + per_s * spent_s, runs + 1
        at = start + timedelta(seconds=spent_s)
        if left < 1:
            return _Course(at, processed, runs, at)
        if runs >= _FOLLOWED:
            break
    gained = rows - left
    if gained <= 0:
        return _Course(at, processed, runs, None)
    further = left / gained
    try:
        return _Course(at, processed, runs + ceil(runs * further), at + (at - now) * further)
    except OverflowError:
        return _Course(at, processed, runs, None)


def _rounded(number: float) -> int:
    """Return an estimate to two digits."""
    return round(int(number), 2 - len(str(int(number))))


def _arrived(sweep: Sweep, ended: Sequence[RunRecord]) -> float | None:
    found = rates(sweep, ended)
    return None if found is None or found.arrived is None else max(0.0, found.arrived)


def _planned_rows(sweep: Sweep, now: datetime) -> int | None:
    """Return the planner's estimate of the rows that are stale at this time; None if there is none."""
    total = 0
    for stage in stages_of(sweep):
        if not isinstance(stage, TableStage):
            return None
        query: Any = stage.model.select(SQL("1")).where(stage.stale(now))
        sql, parameters = database.get_sql_context().sql(query).query()
        try:
            plan: Any = database.execute_sql(f"EXPLAIN (FORMAT JSON) {sql}", parameters).fetchone()[0]
        except PeeweeException as error:
            if is_unavailable(error):
                raise
            return None
        total += int(plan[0]["Plan"]["Plan Rows"])
    return total
