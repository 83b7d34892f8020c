"""Trends of the runs: charts of what they did, their rates, the forecast of a backlog, the progress of open runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, tzinfo
from decimal import Decimal
from math import ceil
from typing import Any, Final, Literal

from peewee import SQL, Case, NodeList, Select, ValuesList, fn

from housekeeping.core.cron import Cron
from housekeeping.core.errors import DatabaseUnavailable
from housekeeping.core.logs import counted, error_line, format_duration
from housekeeping.core.logs import logger as named_logger
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, database, time_limit, translate_postgres_errors
from housekeeping.database.queries import database_now
from housekeeping.engine.gates import describe_with_user
from housekeeping.engine.guard import count_stale, processed_rows
from housekeeping.ledger.alerts import Alert
from housekeeping.ledger.history import RunRecord
from housekeeping.ledger.operators import Override
from housekeeping.ledger.schema import Run
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stage import Backlog
from housekeeping.sweeps.validate_tables import stages_of

logger = named_logger(__name__)

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
      estimated: Whether there are more rows than were counted: `rows` is PostgreSQL's estimate, or at least so many.
      done_at: When no row is left; None if never or unknown.
      runs: The runs that it takes, with the one that is at work; None if never or unknown.
      catches_up: False if more rows become stale than the runs can process, or something stops the runs; None if
        unknown.
      text: All of this in words.
      what: The rows in words.
    """

    rows: int
    estimated: bool
    text: str
    done_at: datetime | None = None
    runs: int | None = None
    catches_up: bool | None = None
    what: str = field(default="", repr=False)

    @property
    def is_notable(self) -> bool:
        """Whether the forecast is more than "one run processes everything" or "an alert keeps one run from that"."""
        return self.estimated or (self.catches_up is False and self.runs is None) or (self.runs or 0) > 1

    def stopped_by(self, cause: Alert | None) -> BacklogForecast:
        """Return the forecast given the active alert that keeps runs from processing rows; None for no such alert."""
        if cause is None or not self.rows:
            return self
        why = f"{cause.worker}: {cause}" if cause.worker else str(cause)
        if cause.name == "last_run":  # the next one may succeed
            text = f"{self.what}; when they will be done is unknown: {why}"
            return replace(self, text=text, done_at=None, catches_up=None)
        return replace(self, text=f"{self.what}, and it will not catch up: {why}", done_at=None, catches_up=False)


def forecast_backlog(
    sweep: Sweep,
    stale: Backlog,
    now: datetime,
    zone: tzinfo,
    *,
    ended: Sequence[RunRecord],
    override: Override | None = None,
    open_run: RunRecord | None = None,
    planned: tuple[int, int] | None = None,
) -> BacklogForecast | None:
    """Return when a worker's backlog will be done; None for a disabled worker.

    Parameters:
      stale: The stale rows, counted up to a limit.
      zone: Time zone of the schedule, and of the times in the text.
      ended: The worker's last runs, oldest first.
      override: What operators have set for the worker.
      open_run: Its newest run. It counts if it is at work.
      planned: Estimates of the rows that are stale now, and of those that were an hour ago, if there are more than were
        counted; see `planned_rows`.
    """
    if not sweep.enabled:
        return None
    if not stale.rows:
        if stale.exact:
            return BacklogForecast(0, False, "nothing is stale", catches_up=True)
        text = f"the stale {sweep.unit}s cannot be counted; when they will be done is unknown"
        return BacklogForecast(0, False, text)
    found = rates(sweep, ended)
    rows, arrived = stale.rows, None if found is None or found.arrived is None else max(0.0, found.arrived)
    if not stale.exact:
        if planned is None:
            what = f"{stale} {sweep.unit}s"
            return BacklogForecast(rows, True, f"{what}; when they will be done cannot be estimated", what=what)
        rows, before = max(rows, _rounded(planned[0])), planned[1]
        # Runs process the oldest rows first, so those of the last hour are still there. A predicate without a time says
        # nothing about them.
        if arrived is None and before < planned[0]:
            arrived = float(planned[0] - before)
    what, speed = f"{'' if stale.exact else 'about '}{counted(rows, sweep.unit)}", pace(sweep, ended)
    if speed is None:
        text = f"{what}; when they will be done is unknown, because no run has processed {sweep.unit}s yet"
        return BacklogForecast(rows, not stale.exact, text, what=what)
    limits = _Limits.of(sweep, speed, override, ended)
    starts = _starts(sweep, now, zone, override, open_run)
    runs, done_at, drained_per_s = _follow(rows, now, starts, limits, (arrived or 0.0) / 3600)
    after = f"after {counted(runs, 'run')}{f', if no further {sweep.unit}s become stale' if arrived is None else ''}"
    known = BacklogForecast(rows, not stale.exact, "", None, runs, catches_up=True, what=what)
    if done_at is None:
        text = (
            f"{what}, and it will never catch up: {_rounded(arrived or 0.0):,} {sweep.unit}s an hour become stale, and "
            f"its runs process at most {_rounded(drained_per_s * 3600):,}; "
            f"{limits.advice(sweep, (arrived or 0.0) / 3600)}"
        )
        return replace(known, text=text, runs=None, catches_up=False)
    is_paused = override is not None and override.state == "paused"
    if is_paused and override is not None and override.until is None:
        why = f"{describe_with_user(override)}: housekeeping resume {sweep.name}; after that, done {after}"
        return replace(known, text=f"{what}, and it will not catch up: {why}", catches_up=False)
    if sweep.schedule is None:
        return replace(known, text=f"{what}, done {after}; it has no schedule")
    if done_at - now > _LATEST:
        return replace(known, text=f"{what}, not done within a year; {limits.advice(sweep, 0.0)}")
    local = done_at.astimezone(zone)
    form = "%H:%M" if local.date() == now.astimezone(zone).date() else "%Y-%m-%d %H:%M"
    text = f"{what}, done at about {local:{form}} {zone}, {after}"
    if is_paused and override is not None and override.until is not None:
        text += f", and paused until {override.until.astimezone(zone):{form}} {zone}"
    return replace(known, text=text, done_at=done_at)


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
        if override.max_runtime_s is not None:
            runtime_s = min(runtime_s, override.max_runtime_s)
        if override.rows_per_s is not None:
            speed = min(speed, override.rows_per_s)
        if override.batch_size is not None:
            since = [run for run in ended if override.since is not None and run.started_at >= override.since]
            # Before the first narrowed run: at worst, a batch of fewer rows takes as long as a full one.
            usual = [processed_by(sweep, [run]) / each for run in ended if (each := run.counts.get("batches"))]
            slower = speed * min(1.0, override.batch_size / max((sweep.limits.batch, *usual)))
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
) -> tuple[int, datetime | None, float]:
    """Follow the runs to come. Return their number, when nothing is left (None: never), and their rows per second."""
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
            return runs, at, 0.0
        if runs >= _FOLLOWED:
            break
    gained, drained_per_s = rows - left, processed / max(1.0, (at - now).total_seconds())
    if gained > 0:
        further = left / gained
        with suppress(OverflowError):
            return runs + ceil(runs * further), at + (at - now) * further, drained_per_s
    return runs, None, drained_per_s


def _rounded(number: float) -> int:
    """Return an estimate to two digits."""
    return round(int(number), 2 - len(str(int(number))))


#: Rows counted at most; the count's time limit usually ends it earlier.
_COUNTED: Final = 10_000_000
#: Shorter runs are over before their progress is of use, so their rows are not counted.
_MIN_DURATION: Final = timedelta(seconds=5)
_FRESH_S: Final = 5.0  # age of a heartbeat up to which the rate and the time left are shown


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of an open run.

    Attributes:
      run_id: Its row in the ledger; None if unknown.
      done: The processed rows.
      total: The processed and the stale rows; None if not counted.
      elapsed_s: Seconds from the run's start until `done` was counted.
      limit_s: Seconds after which the run starts no new batch.
      silent_s: Seconds since then.
    """

    run_id: int | None
    done: int
    total: Backlog | None
    elapsed_s: float
    limit_s: float
    silent_s: float = 0.0

    @property
    def rows_per_s(self) -> float | None:
        """Processed rows per second, on average; None before the first row."""
        return self.done / self.elapsed_s if self.done and self.elapsed_s > 0 else None

    @property
    def share(self) -> float | None:
        """The processed share of all rows, from 0 to 1; None if unknown."""
        if self.total is None or not self.total.exact:
            return None
        return min(1.0, self.done / self.total.rows) if self.total.rows else 1.0

    @property
    def left_s(self) -> float | None:
        """Expected seconds until nothing is left, at least those of the counted rows; None if unknown."""
        if self.total is None or self.rows_per_s is None:
            return None
        return max(0, self.total.rows - self.done) / self.rows_per_s

    @property
    def needs_more_runs(self) -> bool:
        """Whether the run is expected to reach its time limit before nothing is left."""
        return self.left_s is not None and self.elapsed_s + self.left_s > self.limit_s


def progress_of(
    sweep: Sweep,
    counts: dict[str, Any],
    total: Backlog | None,
    elapsed_s: float,
    run_id: int | None = None,
    silent_s: float = 0.0,
) -> Progress:
    """Return the progress of a run with these counts."""
    done = processed_rows(counts, sweep.progress_counts)
    return Progress(run_id, done, total, elapsed_s, sweep.limits.runtime.total_seconds(), silent_s)


def progress_of_run(sweep: Sweep, run: RunRecord, total: Backlog | None = None) -> Progress:
    """Return the progress of an open run until its last heartbeat: nothing is known of the time since then."""
    elapsed_s = (run.heartbeat_at - run.started_at).total_seconds()
    return progress_of(sweep, run.counts, total, elapsed_s, run.run_id, run.silent_s or 0.0)


def count_left(sweep: Sweep, now: datetime | None = None, argument: Any = None) -> Backlog | None:
    """Count the stale rows that are left for a run; None if this fails, takes too long or has no meaning.

    Not all stages of a custom sweep count what they process.

    Parameters:
      now: The time at which the run began; None for the database's time.
    """
    if not sweep.progress_counts:
        return None
    try:
        return count_stale(stages_of(sweep), now or database_now(), _COUNTED, argument, sweep.limits.runtime)
    except Exception as error:  # a predicate may raise anything, and the run shows it
        logger.debug("Could not count the rows of a run", error=error_line(error))
        return None


def format_progress(progress: Progress) -> str:
    """Return the progress of a run in one line: ``1,500 of 10,000 rows (15 %), 500 rows/s, 17 s left``."""
    parts = [_done_of_total(progress)]
    if progress.silent_s > _FRESH_S:
        return f"{parts[0]}, last heartbeat {format_duration(progress.silent_s)} ago"
    if (rows_per_s := progress.rows_per_s) is not None:
        parts.append(f"{rows_per_s:,.0f} rows/s" if rows_per_s >= 1 else f"{rows_per_s:.2g} rows/s")
    if (left_s := progress.left_s) is not None and progress.total is not None:
        over = "" if progress.total.exact else "over "
        runs = " in several runs" if progress.needs_more_runs else ""
        parts.append(f"{over}{format_duration(left_s)} left{runs}")
    return ", ".join(parts)


def _done_of_total(progress: Progress) -> str:
    if progress.total is None:
        return counted(progress.done, "row")
    # More rows may become stale during the run.
    total = replace(progress.total, rows=max(progress.total.rows, progress.done))
    share = "" if progress.share is None else f" ({int(100 * progress.share)} %)"
    return f"{progress.done:,} of {total} {'row' if total == Backlog(1) else 'rows'}{share}"


class ProgressReader:
    """Reader of the progress of open runs. Counts the rows of each run once."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, int], Backlog | None] = {}

    def read(self, found: Iterable[tuple[Sweep, RunRecord | None]], now: datetime) -> dict[str, Progress]:
        """Return the progress of each worker's last run, if it is open and has run for five seconds."""
        progress: dict[str, Progress] = {}
        open_runs = set()
        for sweep, last in found:
            if last is None or last.outcome is not None or last.lost:
                continue
            elapsed = now - last.started_at
            if elapsed < _MIN_DURATION:
                continue
            run = (sweep.database, last.run_id)
            open_runs.add(run)
            if run not in self._totals:
                self._totals[run] = self._total(sweep, last)
            progress[sweep.name] = progress_of_run(sweep, last, self._totals[run])
        self._totals = {run: total for run, total in self._totals.items() if run in open_runs}
        return progress

    @staticmethod
    def _total(sweep: Sweep, last: RunRecord) -> Backlog | None:
        if sweep.argument is not None:  # the ledger does not have the argument
            return None
        left = count_left(sweep, last.started_at)
        return None if left is None else left + Backlog(processed_rows(last.counts, sweep.progress_counts))


#: A shorter observation gives no reliable rate per hour.
_MIN_OBSERVATION: Final = timedelta(minutes=10)
_SUCCESS: Final = ("done", "partial")


@dataclass(frozen=True, slots=True)
class Rates:
    """Rows per hour over the last runs.

    Attributes:
      drained: Processed rows.
      arrived: Rows that became stale; None if unknown, because a backlog was only counted up to its limit.
    """

    drained: float
    arrived: float | None


def rates(sweep: Sweep, runs: Sequence[RunRecord]) -> Rates | None:
    """Return the rates over these runs; None for fewer than two runs or less than ten minutes."""
    counted = [run for run in runs if run.backlog is not None]
    if len(counted) < 2:
        return None
    first, last = counted[0], counted[-1]
    began, ended = _ended_at(first), _ended_at(last)
    if ended - began < _MIN_OBSERVATION:
        return None
    hours = (ended - began) / timedelta(hours=1)
    drained = processed_by(sweep, [run for run in runs if began < _ended_at(run) <= ended])
    assert first.backlog is not None and last.backlog is not None
    known = first.backlog_exact and last.backlog_exact
    return Rates(drained / hours, (drained + last.backlog - first.backlog) / hours if known else None)


def pace(sweep: Sweep, runs: Sequence[RunRecord]) -> float | None:
    """Return the rows processed per second of run time in successful runs; None if they processed none."""
    succeeded = [run for run in runs if run.outcome in _SUCCESS]
    processed = processed_by(sweep, succeeded)
    spent_s = sum(run.duration_s or 0.0 for run in succeeded)
    return processed / spent_s if processed and spent_s > 0 else None


def processed_by(sweep: Sweep, runs: Iterable[RunRecord]) -> int:
    """Return the number of rows that these runs processed."""
    return sum(processed_rows(run.counts, sweep.progress_counts) for run in runs)


def _ended_at(run: RunRecord) -> datetime:
    assert run.finished_at is not None
    return run.finished_at
