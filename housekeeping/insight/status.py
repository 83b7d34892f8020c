"""Status of an installation: workers with last run, backlog and alerts, the progress of open runs, and processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import takewhile
from typing import Any, Final

from peewee import PeeweeException, fn

from housekeeping.brokers import QueueLengths, dead_actors, queue_lengths
from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.cron import Cron
from housekeeping.core.errors import DatabaseUnavailable, HousekeepingError, RedisUnavailable, SettingsError
from housekeeping.core.logs import counted, error_line, format_duration
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.redis import redis_client
from housekeeping.core.settings import MAIN, Settings
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, database, time_limit, translate_postgres_errors
from housekeeping.database.errors import Kind, is_disk_full, is_lock_timeout, is_unavailable, kind_of
from housekeeping.database.times import ClockSkew, database_now, read_database_clock
from housekeeping.engine import in_order
from housekeeping.engine.alerts import (
    DEAD_LETTERS,
    DEFAULT_COUNT_LIMIT,
    HELD_BACK,
    NO_SCHEDULER,
    NO_SPACE,
    UNAVAILABLE,
    Observation,
    Rates,
    backlog,
    failing_arguments,
    held,
    is_failed,
    last_ended,
    oldest,
    process_alerts,
    rates,
    worker_alerts,
)
from housekeeping.engine.failures import Standing, standing
from housekeeping.engine.gates import LockGate
from housekeeping.engine.guard import UNCONFIRMED, count_stale, processed_rows
from housekeeping.engine.lateness import known_late_alert
from housekeeping.engine.registry import by_database, by_problem
from housekeeping.insight.alerts import Headline, explained, what_is_wrong
from housekeeping.insight.trends import BacklogForecast, forecast_backlog
from housekeeping.insight.wording import State, format_age, format_time, next_tick, state_of
from housekeeping.ledger import history, runs
from housekeeping.ledger.alerts import INTERVAL, Alert, AlertKey, last_evaluation, merged, reconcile
from housekeeping.ledger.history import RunRecord
from housekeeping.ledger.leases import HeldLease, held_leases
from housekeeping.ledger.operators import Override, override_of
from housekeeping.ledger.processes import UNKNOWN, Processes, read_processes
from housekeeping.ledger.runs import DISK_FULL, STOPPED
from housekeeping.ledger.schema import Run
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stage import Backlog, as_cursor
from housekeeping.sweeps.validate_tables import stages_of
from housekeeping.sweeps.values import SetupProblem

logger = named_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """Status of a worker at one moment.

    Attributes:
      switch: The override in effect, paused or narrowed; None without one.
      next_tick: In UTC; None without a schedule, or when disabled or paused without an end.
      last_run: The newest run that began, its counts in the worker's order; None when it never ran. Skipped and
        missed ticks are not runs.
      last_success: The end of the last run that reached its end or its limits; None without one.
      rates: Rows per hour that became stale and that were processed, by the last runs; None if too few runs.
      waiting: The stale rows; None when they were never counted.
      counted_at: When they were counted, if that was not now; `alarms` has the reason.
      held: The stale rows that stay because they are on hold; None if the worker has no hold, or they could not be
        counted.
      oldest: The oldest stale row's first order column; None without stale rows.
      alarms: The active alerts.
      rejected: Failures and rejections of the last runs by argument and cause, failed runs and then most rows first.
      rejected_more: The number of further causes and arguments.
      problem: Why the worker is not set up; None when it is.
      forecast: When the backlog will be done; None if it could not be counted.
      ended: Its last runs that ended, oldest first.
      database: Name of its database.
      open_runs: Number of its open runs, up to a limit; None if it is not set up.
    """

    worker: str
    state: State
    switch: Override | None
    schedule: str | None
    last_run: RunRecord | None
    last_success: datetime | None
    problem: SetupProblem | None = None
    next_tick: datetime | None = None
    rates: Rates | None = None
    waiting: Backlog | None = None
    counted_at: datetime | None = None
    held: Backlog | None = None
    oldest: Any = None
    forecast: BacklogForecast | None = None
    alarms: list[Alert] = field(default_factory=list)
    rejected: Sequence[Standing] = ()
    rejected_more: int = 0
    ended: Sequence[RunRecord] = ()
    database: str = MAIN
    open_runs: int | None = None

    @property
    def trouble(self) -> int:
        """How much a person should look at it: 0 if not at all, 4 for a critical alert.

        What comes last is known already: an acknowledged alert, one that another explains, a pause, lower limits.
        """
        run = self.last_run
        alerts = [alert for alert in self.alarms if alert.acknowledged is None and alert.cause is None]
        if alerts:
            return 4 if any(alert.severity == "critical" for alert in alerts) else 3
        if run is not None and (run.lost or is_failed(run.outcome)):
            return 2
        return int(bool(self.alarms) or self.switch is not None)

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``workers`` in ``housekeeping status --json``."""
        first = as_cursor((self.oldest,)) or [None]
        values = {
            "worker": self.worker,
            "state": self.state,
            "not_set_up": self.problem.text if self.problem else None,
            "switch": self.switch,
            "schedule": self.schedule,
            "next_tick": self.next_tick,
            "last_run": None if self.last_run is None else _run_as_json(self.last_run),
            "backlog": self.waiting.rows if self.waiting else None,
            "backlog_exact": self.waiting.exact if self.waiting else None,
            "backlog_counted_at": self.counted_at,
            "held": self.held.rows if self.held else None,
            "held_exact": self.held.exact if self.held else None,
            "oldest": first[0],
            "last_success": self.last_success,
            "arrived_per_hour": self.rates.arrived if self.rates else None,
            "drained_per_hour": self.rates.drained if self.rates else None,
            "forecast": self.forecast,
            "alarms": self.alarms,
            "rejected": self.rejected,
            "rejected_more": self.rejected_more,
        }
        return history.name_database(values, self.database)


#: Workers without a problem that are listed after those with one; more are folded.
_UNFOLDED: Final = 10


def by_trouble(
    statuses: Iterable[WorkerStatus], *, fold: bool | None = None
) -> tuple[list[WorkerStatus], list[WorkerStatus]]:
    """Return the workers in order of trouble, and those without a problem that are folded.

    Parameters:
      fold: Whether to fold those without a problem; None if they are many and would hide the others.
    """
    ordered = sorted(statuses, key=lambda status: -status.trouble)
    healthy = [status for status in ordered if not status.trouble]
    if fold is None:
        fold = _UNFOLDED < len(healthy) < len(ordered)
    return (ordered[: len(ordered) - len(healthy)], healthy) if fold else (ordered, [])


def format_backlog(status: WorkerStatus, now: datetime) -> str:
    """Return a worker's backlog: ``5,000``, ``at least 10,000``, ``5,000 (12 min ago)`` or ``?``."""
    if status.waiting is None:
        return "?"
    return f"{status.waiting} ({format_age(status.counted_at, now)})" if status.counted_at else str(status.waiting)


def worker_status(
    sweep: Sweep, now: datetime, zone: Any, *, count: bool = True, processes: Processes = UNKNOWN
) -> WorkerStatus:
    """Return a worker's status, by a few index probes and a bounded count.

    If the backlog cannot be counted, for example because the table is locked, that is an alert of this worker. The
    status then has the backlog at the end of an earlier run. A disabled worker gets no such alert.

    Parameters:
      count: Whether there is time to read the application's tables. Without it, the status is as if they were locked.

    Raises:
      peewee.PeeweeException, DatabaseUnavailable: The database does not answer.
    """
    problem, switch, ended = sweep.lacks(), override_of(sweep.name), last_ended(sweep)
    open_runs = history.open_runs(sweep.name)
    last = max((*ended[-1:], *open_runs[-1:]), key=lambda run: run.run_id, default=None)
    status = WorkerStatus(
        sweep.name,
        state_of(sweep, switch, problem),
        switch,
        sweep.schedule,
        None if last is None else replace(last, counts=in_order(sweep, last.counts)),
        _last_success(sweep),
        problem,
        ended=ended,
        database=sweep.database,
    )
    if problem is not None:
        return status
    waiting, counted_at, first, on_hold, course = None, None, None, None, None
    seen = _observe(sweep, status, open_runs, now, zone, processes)
    try:
        if not count:
            raise TimeoutError("the other workers' tables took too long")
        limit = sweep.alerts.backlog or DEFAULT_COUNT_LIMIT
        with time_limit(STATEMENT_TIME, LOCK_TIME):
            waiting = backlog(sweep, now, limit)
            first = oldest(sweep, now)
            on_hold = held(sweep, now, limit)
            course = forecast_backlog(sweep, waiting, now, zone, ended=ended, override=switch, open_run=last)
            late = None
            if waiting.rows and sweep.enabled:
                late = known_late_alert(sweep, ended[-1].finished_at if ended else None, now)
        seen = replace(seen, waiting=waiting, late=late)
    except Exception as error:
        if is_unavailable(error):
            raise
        waiting, counted_at = _last_counted(ended)
        seen = replace(seen, uncounted=_why_uncounted(sweep, now, error) if sweep.enabled else None)
    rejected, rejected_more = standing(sweep.name)
    return replace(
        status,
        next_tick=next_tick(sweep, now, zone, switch),
        rates=rates(sweep, ended),
        waiting=waiting,
        counted_at=counted_at,
        held=on_hold,
        oldest=first,
        forecast=course,
        alarms=worker_alerts(sweep, seen),
        open_runs=len(seen.open_runs),
        rejected=rejected,
        rejected_more=rejected_more,
    )


def _why_uncounted(sweep: Sweep, now: datetime, error: Exception) -> str:
    """Return the error; of a locked table also the session that locks it, of a failing predicate where its row is."""
    if is_lock_timeout(error):
        with suppress(PeeweeException), time_limit(STATEMENT_TIME, LOCK_TIME):
            locks = LockGate(stages_of(sweep), now).examine()
            return locks.text if locks.reason is not None else error_line(error)
    if isinstance(error, PeeweeException) and kind_of(error) is Kind.ROW:
        return f"{error_line(error)}; housekeeping plan {sweep.name} looks for the row"
    return error_line(error)


def _last_counted(ended: Sequence[RunRecord]) -> tuple[Backlog | None, datetime | None]:
    """Return the last backlog in the ledger, and when it was counted."""
    for run in reversed(ended):
        if run.backlog is not None:
            return Backlog(run.backlog, exact=bool(run.backlog_exact)), run.finished_at
    return None, None


def _observe(
    sweep: Sweep,
    status: WorkerStatus,
    open_runs: Sequence[RunRecord],
    now: datetime,
    zone: Any,
    processes: Processes,
) -> Observation:
    """Return what the ledger and the processes tell of a worker."""
    ended = sorted(status.ended, key=lambda run: (run.finished_at, run.run_id))
    unconfirmed: RunRecord | None = None
    if sweep.guard.first_run:
        unconfirmed = history.newest_with_reason(sweep.name, UNCONFIRMED, after=ended[-1].run_id if ended else 0)
    is_due = sweep.schedule and all(run.lost for run in open_runs) and status.state in ("on", "narrow")
    return Observation(
        now=now,
        ended=ended,
        failing=failing_arguments(sweep),
        open_runs=open_runs,
        unconfirmed={} if unconfirmed is None else unconfirmed.counts,
        attempted_at=_last_attempt(sweep) if is_due else None,
        period=Cron(sweep.schedule, zone).period(now) if sweep.schedule and is_due else None,
        processes=processes,
    )


def _last_attempt(sweep: Sweep) -> datetime | None:
    """Return when a run last began or was held back; None for a worker without any row in the ledger."""
    of_worker = Run.worker == sweep.name
    was_run = history.began() | Run.reason.in_(HELD_BACK)
    began: Any = Run.select(fn.MAX(Run.started_at)).where(of_worker & was_run).scalar()
    # A worker whose ticks were all missed or skipped has never run.
    known: datetime | None = began or Run.select(fn.MIN(Run.started_at)).where(of_worker).scalar()
    return known


def _last_success(sweep: Sweep) -> datetime | None:
    succeeded = (Run.outcome == "done") | ((Run.outcome == "partial") & (Run.reason.not_in(STOPPED)))
    last = Run.select(Run.finished_at).where((Run.worker == sweep.name) & succeeded).order_by(Run.id.desc())
    ended_at: datetime | None = last.limit(1).scalar()
    return ended_at


def _run_as_json(run: RunRecord) -> dict[str, Any]:
    names = ("run_id", "outcome", "reason", "trigger", "tick", "started_at", "duration_s", "counts", "error")
    values = run.as_json()
    return {name: values[name] for name in (*names, "heartbeat_age_s", "silent", "maybe_lost")}


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
    """Count the stale rows that a run has before it; None if that fails, takes too long or has no meaning.

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

    def read(self, found: Iterable[tuple[Sweep, WorkerStatus]], now: datetime) -> dict[str, Progress]:
        """Return the progress of each worker's last run, if it is open and has run for five seconds."""
        progress: dict[str, Progress] = {}
        open_runs = set()
        for sweep, status in found:
            last = status.last_run
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


#: A reader waits no longer for the counts of all workers. The rest of a status is always read.
_BUDGET_S: Final = 10.0


def worker_statuses(
    sweeps: Sequence[Sweep], now: datetime, zone: Any, processes: Processes = UNKNOWN
) -> list[WorkerStatus]:
    """Return the status of each worker, in order; all are of the current database.

    Raises:
      peewee.PeeweeException, DatabaseUnavailable: The database does not answer.
    """
    end = time.monotonic() + _BUDGET_S
    return [worker_status(sweep, now, zone, count=time.monotonic() < end, processes=processes) for sweep in sweeps]


@dataclass(slots=True)
class Unavailable:
    """A server that does not answer.

    Attributes:
      server: Such as ``PostgreSQL, database main``, ``Redis`` or ``RabbitMQ``.
      since: When it last answered, as far as known; else when it was first found unavailable.
      database: Its name in the settings, if it is a database.
      shown: What the pages show instead, one text for each part.
    """

    server: str
    database: str | None
    error: str
    since: datetime
    shown: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "; ".join([f"{self.error}, since {self.since:%H:%M:%S} UTC", *self.shown])


@dataclass(slots=True)
class Snapshot:
    """State of the installation at one time. Not changed after it has been read.

    Attributes:
      statuses: Status by worker. Those of an unavailable database are the last ones that could be read.
      leases_note: Why the leases are incomplete or old; empty if they are neither.
      leases_complete: False if Redis is unavailable and only the database's leases are included.
      unavailable: The servers that do not answer, by `Unavailable.server`.
      clocks: Differences between this machine's clock and those of the databases that answered, by their names.
      processes: Workers and schedulers by their heartbeats; unknown if Redis does not answer or rejects writes.
      alerts: All active alerts, the gravest first. What could not be read keeps the alerts that it had.
      progress: Progress of the last run of each worker where it is open.
      read_at: Time of the last successful reading of each part.
      late_s: Seconds since this was read, if the next reading takes long; else 0.
    """

    at: datetime
    statuses: dict[str, WorkerStatus] = field(default_factory=dict)
    queues: dict[str, QueueLengths] = field(default_factory=dict)
    leases: Sequence[HeldLease] = ()
    leases_note: str = ""
    leases_complete: bool = False
    unavailable: dict[str, Unavailable] = field(default_factory=dict)
    clocks: dict[str, ClockSkew] = field(default_factory=dict)
    processes: Processes = UNKNOWN
    alerts: Sequence[Alert] = ()
    progress: dict[str, Progress] = field(default_factory=dict)
    read_at: dict[str, datetime] = field(default_factory=dict)
    late_s: float = 0.0

    @property
    def errors(self) -> list[str]:
        """Return what could not be read, one line for each server."""
        return [str(each) for each in self.unavailable.values()]

    @property
    def has_alerts(self) -> bool:
        """Whether there is an alert that is not acknowledged, or something cannot be read."""
        known = {each.subject for each in self.alerts if each.name in (UNAVAILABLE, NO_SPACE) and each.acknowledged}
        is_new = any(alert.acknowledged is None and alert.cause is None for alert in self.alerts)
        return bool(self.unavailable.keys() - known) or is_new or bool(self.wrong_clocks)

    @property
    def headline(self) -> Headline:
        """Return in one sentence what is wrong, since when and what to do, or that all is right."""
        if self.late_s or not (self.clocks or self.unavailable):
            return Headline("Unknown: the servers do not answer in time", more="Wait, or look at them.")
        if wrong := what_is_wrong(self.alerts):
            return wrong
        if self.has_alerts:
            text = "; ".join([*self.errors, *map(str, self.wrong_clocks.values())])
            return Headline(text, more="Alerts may be missing.")
        workers = [each for each in self.statuses.values() if each.problem is None]
        ticks = [run.tick for each in workers for run in (each.last_run, *each.ended) if run is not None and run.tick]
        known = f", {counted(len(self.alerts), 'alert')} acknowledged" if self.alerts else ""
        text = f"All right: {counted(len(workers), 'worker')}{known}"
        return Headline(text, "last tick", max(ticks)) if ticks else Headline(f"{text}, no tick yet")

    @property
    def wrong_clocks(self) -> dict[str, ClockSkew]:
        """Return the differences that are too large, by database."""
        return {name: clock for name, clock in self.clocks.items() if clock.exceeded}

    @property
    def problems(self) -> dict[str, SetupProblem]:
        """Return the setup problem of each worker that has one."""
        return {name: each.problem for name, each in self.statuses.items() if each.problem is not None}

    @property
    def not_set_up(self) -> dict[SetupProblem, list[str]]:
        """Return the names of the workers with a setup problem, grouped by problem."""
        return by_problem(self.problems)


_NAMED: Final = 5  # workers that an alert names


class SnapshotReader:
    """Reader of snapshots, for terminal, dashboard and alerts. Only one thread may read at a time.

    Parameters:
      sweeps: All workers: the alerts of the installation depend on them.
      only: Name of the only worker whose status is read; None for all.
      with_progress: Whether to count the rows that open runs have before them.
    """

    def __init__(
        self, settings: Settings, sweeps: dict[str, Sweep], *, only: str | None = None, with_progress: bool = True
    ) -> None:
        self._settings = settings
        self._sweeps = sweeps
        self._read_sweeps = [sweep for sweep in sweeps.values() if only in (None, sweep.name)]
        self._with_progress = with_progress
        self._progress: dict[str, ProgressReader] = {}  # by database
        #: Queue -> its lengths, and the actors of its newest dead letters.
        self._dead: dict[str, tuple[QueueLengths, str]] = {}

    def read(self, before: Snapshot | None = None) -> Snapshot:
        """Read all servers, and store which alerts have begun and ended.

        If a server is unavailable, note it and keep its part of the previous snapshot.
        """
        found, before = Snapshot(SYSTEM_CLOCK.now()), before or Snapshot(SYSTEM_CLOCK.now())
        found.read_at = dict(before.read_at)
        settings = self._settings
        client = None if settings.redis_url is None else redis_client(settings.redis_url)
        found.processes = read_processes(client, settings.namespace, found.at)
        if found.processes.full is not None:
            _note(found, before, "Redis", found.processes.full)
        ever_ran = [
            self._read_database(name, sweeps, found, before) for name, sweeps in by_database(self._read_sweeps).items()
        ]
        found.at = next((clock.server_at for clock in found.clocks.values()), found.at)
        found.processes = found.processes.dated(found.at)
        found.statuses = {name: found.statuses[name] for name in self._sweeps if name in found.statuses}
        self._read_queues(found, before)
        self._read_leases(found, before)
        # Assumed if no ledger could be read.
        self._read_alerts(found, before, ever_ran=any(ever_ran) or not found.clocks)
        return found

    def _read_database(self, name: str, sweeps: Sequence[Sweep], found: Snapshot, before: Snapshot) -> bool:
        """Return whether the ledger has a run of a worker process; False if it could not be read."""
        server, ever_ran = database_server(name), False
        with _noting(found, before, server, name), database.using(name), translate_postgres_errors():
            # The first query raises an error at once if the ledger is locked. The others would wait for ten seconds.
            with time_limit(STATEMENT_TIME, LOCK_TIME):
                ever_ran = runs.any_by_a_worker_process()
            clock = read_database_clock()
            read = worker_statuses(sweeps, clock.server_at, self._settings.timezone, found.processes)
            statuses = {each.worker: each for each in read}
            if self._with_progress:
                reader = self._progress.setdefault(name, ProgressReader())
                found.progress |= reader.read([(sweep, statuses[sweep.name]) for sweep in sweeps], clock.server_at)
            found.statuses |= statuses
            found.clocks[name] = clock
            found.read_at[server] = clock.server_at
        if name not in found.clocks:
            names = {sweep.name for sweep in sweeps}
            found.statuses |= {worker: status for worker, status in before.statuses.items() if worker in names}
            found.unavailable[server].shown.append(_shown(found, "the workers", server))
        return ever_ran

    def _read_queues(self, found: Snapshot, before: Snapshot) -> None:
        found.queues = before.queues
        with _noting(found, before, self._broker):
            found.queues = queue_lengths(self._settings, sorted({sweep.queue for sweep in self._sweeps.values()}))
            found.read_at["queues"] = found.at
        if self._broker in found.unavailable:
            found.unavailable[self._broker].shown.append(_shown(found, "the queues", "queues"))

    def _read_alerts(self, found: Snapshot, before: Snapshot, *, ever_ran: bool) -> None:
        read = {name: each for name, each in found.statuses.items() if each.database in found.clocks}
        self._date_outages(found, before)
        evaluated = [
            *(
                Alert(
                    NO_SPACE if each.error == found.processes.full else UNAVAILABLE,
                    each.error,
                    since=each.since,
                    subject=each.server,
                )
                for each in found.unavailable.values()
            ),
            *(alert for name in found.clocks for alert in _full_disk(name, read.values())),
            *process_alerts(
                [sweep for name, sweep in self._sweeps.items() if name not in found.problems],
                found.processes,
                {name: lengths.waiting for name, lengths in found.queues.items()},
                found.at,
                self._settings.timezone,
                ever_ran=ever_ran,
            ),
            *self._dead_letters(found),
            *(alert for status in read.values() for alert in status.alarms),
        ]
        judged = partial(self._judges, found, {alert.key for alert in evaluated})
        known = {alert.key: alert for alert in before.alerts}
        alerts: Sequence[Alert] = merged(evaluated, known, judged)
        if MAIN in found.clocks:
            with (
                _noting(found, before, database_server(MAIN), MAIN),
                database.using(MAIN),
                translate_postgres_errors(),
                time_limit(STATEMENT_TIME, LOCK_TIME),
            ):
                reconciled = reconcile(evaluated, judged, found.clocks[MAIN].server_at)
                alerts = list(reconciled.alerts)
                if reconciled.error is not None and is_disk_full(reconciled.error):
                    full = Alert(NO_SPACE, f"{DISK_FULL}{error_line(reconciled.error)}", subject=database_server(MAIN))
                    if full.key not in {alert.key for alert in alerts}:
                        began = known[full.key].since if full.key in known else found.at
                        alerts.append(replace(full, since=began))
        shown = {"", *(sweep.name for sweep in self._read_sweeps)}
        found.alerts = explained((each for each in alerts if each.worker in shown), self._sweeps, database_server)
        of_worker: dict[str, list[Alert]] = {}
        for alert in found.alerts:
            of_worker.setdefault(alert.worker, []).append(alert)
        found.statuses = {name: replace(each, alarms=of_worker.get(name, [])) for name, each in found.statuses.items()}

    def _date_outages(self, found: Snapshot, before: Snapshot) -> None:
        """Set the times at which the servers that do not answer have answered last, as far as known.

        The processes of the installation read all servers every half minute. What the last reading has not found is
        newer than that reading.
        """
        new = [each for server, each in found.unavailable.items() if server not in before.unavailable]
        for each in new:
            each.since = before.read_at.get(each.server, each.since)
        unknown = [each for each in new if each.server not in before.read_at]
        if unknown and MAIN in found.clocks:
            with _noting(found, before, database_server(MAIN), MAIN), database.using(MAIN), translate_postgres_errors():
                evaluated_at = last_evaluation()
            for each in unknown:
                if evaluated_at is not None and found.at - 2 * INTERVAL < evaluated_at < each.since:
                    each.since = evaluated_at
        found.read_at |= {server: found.at for server in self._servers - found.unavailable.keys()}

    def _dead_letters(self, found: Snapshot) -> Iterator[Alert]:
        """Yield an alert for each queue with dead letters; an acknowledged one begins again with the next letter."""
        if self._broker in found.unavailable:
            return
        for queue, lengths in found.queues.items():
            if not lengths.dead:
                continue
            if self._dead.get(queue, (None,))[0] != lengths:
                actors: Counter[str] = Counter()
                with suppress(HousekeepingError):
                    actors = dead_actors(self._settings, queue)
                self._dead[queue] = lengths, ", ".join(f"{name} ({number})" for name, number in actors.most_common(5))
            names = f"; the newest are of {self._dead[queue][1]}" if self._dead[queue][1] else ""
            text = f"{counted(lengths.dead, 'dead letter')} in queue {queue!r}{names}"
            yield Alert(DEAD_LETTERS, text, 0, lengths.dead, lengths.died_at, subject=queue, renewed_at=lengths.died_at)

    def _judges(self, found: Snapshot, evaluated: Set[AlertKey], alert: Alert) -> bool:
        """Return whether an alert would have been found if it were still active: whether all that it needs was read."""
        if alert.worker:
            status = found.statuses.get(alert.worker)
            is_read = status is not None and status.database in found.clocks
            # These are also told by the heartbeats.
            if alert.name in ("stuck", "overdue"):
                return is_read and found.processes.known
            return is_read and not (alert.name == "backlog" and (alert.worker, "unseen", "") in evaluated)
        if alert.name == UNAVAILABLE:
            return alert.subject in self._servers
        if alert.name == NO_SPACE:
            return alert.subject in self._servers
        # A process may know only some of the workers, and so a longer period. A living scheduler is known to all.
        if alert.name == NO_SCHEDULER:
            return any(each.alive for each in found.processes.schedulers)
        is_read = self._broker not in found.unavailable and alert.subject in ("", *found.queues)
        return is_read and (found.processes.known or alert.name == DEAD_LETTERS)

    @property
    def _servers(self) -> set[str]:
        return {*(database_server(name) for name in by_database(self._read_sweeps)), "Redis", self._broker}

    def _read_leases(self, found: Snapshot, before: Snapshot) -> None:
        settings = self._settings
        try:
            if not found.clocks:
                raise DatabaseUnavailable("no database has answered")  # and each would be waited for again
            try:
                found.leases = held_leases(redis_client(settings.require_redis_url()), settings.namespace)
                found.leases_complete, found.read_at["leases"] = True, found.at
            except (RedisUnavailable, SettingsError) as error:
                _note(found, before, "Redis", error_line(error))
                found.leases = held_leases(None, settings.namespace)
                found.leases_note = "Redis is unavailable; these are the leases of open runs in the database."
        except (HousekeepingError, PeeweeException):  # the database is noted already, or will be
            found.leases, found.leases_complete = before.leases, before.leases_complete
            found.leases_note = f"PostgreSQL is unavailable: {_shown(found, 'the leases', 'leases')}."

    @property
    def _broker(self) -> str:
        if self._settings.on_rabbitmq:
            return "RabbitMQ"
        same = self._settings.broker_url in (None, self._settings.redis_url)
        return "Redis" if same else "Redis of the broker"


def _full_disk(name: str, statuses: Iterable[WorkerStatus]) -> Iterator[Alert]:
    """Yield an alert if the last runs of workers failed because the disk of their database was full."""
    found = dict[str, list[RunRecord]]()
    for status in statuses:
        ended = sorted(status.ended, key=lambda run: (run.finished_at, run.run_id), reverse=True)
        full = list(takewhile(lambda run: (run.reason or "").startswith(DISK_FULL), ended))
        if full and status.database == name:
            found[status.worker] = full
    if found:
        last = max((runs[0] for runs in found.values()), key=lambda run: (run.finished_at, run.run_id))
        more = " ..." if len(found) > _NAMED else ""
        text = f"{last.reason}; {counted(len(found), 'worker')} cannot write: {', '.join(list(found)[:_NAMED])}{more}"
        since = min(runs[-1].finished_at for runs in found.values() if runs[-1].finished_at)
        yield Alert(NO_SPACE, text, since=since, subject=database_server(name))


def database_server(name: str) -> str:
    """Return how the pages call a database."""
    return f"PostgreSQL, database {name}"


@contextmanager
def _noting(found: Snapshot, before: Snapshot, server: str, database_name: str | None = None) -> Iterator[None]:
    """Note in the snapshot that the server is unavailable if the block fails."""
    try:
        yield
    except (HousekeepingError, PeeweeException) as error:
        is_named = database_name is None or isinstance(error, DatabaseUnavailable)
        text = error_line(error) if is_named else f"{server}: {error_line(error)}"
        _note(found, before, server, text, database_name)


def _note(found: Snapshot, before: Snapshot, server: str, error: str, database_name: str | None = None) -> None:
    if server not in found.unavailable:
        earlier = before.unavailable.get(server)
        since = earlier.since if earlier else found.at
        found.unavailable[server] = Unavailable(server, database_name, error, since)


def _shown(found: Snapshot, part: str, key: str) -> str:
    at = found.read_at.get(key)
    return f"{part} have not been read yet" if at is None else f"{part} are shown as of {format_time(at)} UTC"
