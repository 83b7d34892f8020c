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

from peewee import PeeweeException

from housekeeping.brokers import QueueLengths, dead_actors, queue_lengths
from housekeeping.core.clock import SYSTEM_CLOCK, ClockSkew
from housekeeping.core.cron import Cron
from housekeeping.core.errors import DatabaseUnavailable, HousekeepingError, RedisFull, RedisUnavailable, SettingsError
from housekeeping.core.logs import counted, error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.redis import shared_redis
from housekeeping.core.settings import MAIN, Settings
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, database, time_limit, translate_postgres_errors
from housekeeping.database.errors import is_disk_full, is_unavailable
from housekeeping.database.queries import read_database_clock, why_read_only
from housekeeping.engine import in_order
from housekeeping.engine.alerts import (
    DEAD_LETTERS,
    ERASURE_LATE,
    HELD_BACK,
    NO_SCHEDULER,
    NO_SPACE,
    UNAVAILABLE,
    Observation,
    erasure_alerts,
    failing_arguments,
    is_failed,
    process_alerts,
    runs_looked_at,
    worker_alerts,
)
from housekeeping.engine.failures import Standing, standing
from housekeeping.engine.guard import UNCONFIRMED
from housekeeping.engine.registry import by_database, by_problem, setup_problems
from housekeeping.insight.alerts import Active, Headline, explained, what_is_wrong, what_stops
from housekeeping.insight.backlogs import (
    Counted,
    count_backlogs,
    known_late_alert,
    last_counted,
    planned_rows,
    why_uncounted,
)
from housekeeping.insight.trends import BacklogForecast, Progress, ProgressReader, Rates, forecast_backlog, rates
from housekeeping.insight.wording import WorkerState, format_age, format_time, next_tick, state_of
from housekeeping.leases.renewal import lease_store
from housekeeping.ledger import history, ticks
from housekeeping.ledger.alerts import INTERVAL, Alert, AlertKey, last_evaluation, merged, reconcile
from housekeeping.ledger.erasures import LateErasures, late_erasures
from housekeeping.ledger.history import RunRecord, WorkerRuns
from housekeeping.ledger.leases import HeldLease, held_leases
from housekeeping.ledger.operators import Override, overrides
from housekeeping.ledger.processes import UNKNOWN, Processes, heartbeat_store, read_processes
from housekeeping.ledger.runs import DISK_FULL
from housekeeping.ledger.schema import name_database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stage import Backlog, as_cursor
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
    state: WorkerState
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
            "override": self.switch,
            "schedule": self.schedule,
            "next_tick": self.next_tick,
            "last_run": self.last_run,
            "backlog": self.waiting.rows if self.waiting else None,
            "backlog_exact": self.waiting.exact if self.waiting else None,
            "backlog_counted_at": self.counted_at,
            "held": self.held.rows if self.held else None,
            "held_exact": self.held.exact if self.held else None,
            "oldest": first[0],
            "last_success_at": self.last_success,
            "arrived_per_hour": self.rates.arrived if self.rates else None,
            "processed_per_hour": self.rates.drained if self.rates else None,
            "forecast": self.forecast,
            "alerts": self.alarms,
            "rejected": self.rejected,
            "rejected_more": self.rejected_more,
        }
        return name_database(values, self.database)


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


#: A reader waits no longer for the counts of all workers. The rest of a status is always read.
_BUDGET_S: Final = 10.0


def worker_statuses(
    sweeps: Sequence[Sweep], now: datetime, zone: Any, processes: Processes = UNKNOWN
) -> list[WorkerStatus]:
    """Return the status of each worker, in order, by as many statements as for one; all are of the current database.

    If a backlog cannot be counted, for example because its table is locked, that is an alert of its worker. The status
    then has the backlog at the end of an earlier run. A disabled worker gets no such alert.

    Raises:
      peewee.PeeweeException, DatabaseUnavailable: The database does not answer.
    """
    names, problems = [sweep.name for sweep in sweeps], setup_problems(sweeps)
    with time_limit(STATEMENT_TIME, LOCK_TIME):
        switches = overrides()
        known = history.runs_of_workers(
            {sweep.name: runs_looked_at(sweep) for sweep in sweeps}, unconfirmed=UNCONFIRMED, held_back=HELD_BACK
        )
        failing, rejected = failing_arguments(sweeps), standing(names)
    set_up, until = [sweep for sweep in sweeps if problems.get(sweep.name) is None], time.monotonic() + _BUDGET_S
    backlogs = count_backlogs(set_up, now, until)
    many = [sweep for sweep in set_up if sweep.enabled and not _is_exact(backlogs[sweep.name])]
    planned = planned_rows(many, now, until)
    found = []
    for sweep in sweeps:
        name, runs = sweep.name, known[sweep.name]
        last = max((*runs.ended[-1:], *runs.open_runs[-1:]), key=lambda run: run.run_id, default=None)
        status = WorkerStatus(
            name,
            state_of(sweep, switches.get(name), problems.get(name)),
            switches.get(name),
            sweep.schedule,
            None if last is None else replace(last, counts=in_order(sweep, last.counts)),
            runs.succeeded_at,
            problems.get(name),
            ended=runs.ended,
            database=sweep.database,
        )
        if status.problem is None:
            seen = replace(
                _observe(sweep, status, runs, now, zone),
                failing=failing.get(name, ((), 0)),
                processes=processes,
            )
            status = _with_backlog(sweep, status, seen, backlogs[name], planned.get(name), zone)
            shown, more = rejected.get(name, ((), 0))
            status = replace(
                status,
                next_tick=next_tick(sweep, now, zone, status.switch),
                rates=rates(sweep, runs.ended),
                open_runs=len(runs.open_runs),
                rejected=shown,
                rejected_more=more,
            )
        found.append(status)
    return found


def _is_exact(found: Counted | Exception) -> bool:
    return isinstance(found, Exception) or found.waiting.exact


def _with_backlog(
    sweep: Sweep,
    status: WorkerStatus,
    seen: Observation,
    found: Counted | Exception,
    planned: tuple[int, int] | Exception | None,
    zone: Any,
) -> WorkerStatus:
    """Return the status with the backlog, its forecast, and the alerts."""
    if isinstance(found, Counted) and found.waiting.rows and sweep.enabled:
        try:
            ended_at = seen.ended[-1].finished_at if seen.ended else None
            seen = replace(seen, late=known_late_alert(sweep, ended_at, seen.now))
        except Exception as error:  # a predicate may raise anything
            if is_unavailable(error):
                raise
            found = error
    if isinstance(found, Exception):
        waiting, counted_at = last_counted(status.ended)
        seen = replace(seen, uncounted=why_uncounted(sweep, seen.now, found) if sweep.enabled else None)
        return replace(status, waiting=waiting, counted_at=counted_at, alarms=worker_alerts(sweep, seen))
    return replace(
        status,
        waiting=found.waiting,
        oldest=found.oldest,
        held=found.held,
        forecast=forecast_backlog(
            sweep,
            found.waiting,
            seen.now,
            zone,
            ended=status.ended,
            override=status.switch,
            open_run=status.last_run,
            planned=None if isinstance(planned, Exception) else planned,
        ),
        alarms=worker_alerts(sweep, replace(seen, waiting=found.waiting)),
    )


def _observe(sweep: Sweep, status: WorkerStatus, runs: WorkerRuns, now: datetime, zone: Any) -> Observation:
    """Return what the alerts of a worker are evaluated from."""
    ended: list[RunRecord] = sorted(runs.ended, key=lambda run: (run.finished_at, run.run_id))
    unconfirmed = runs.unconfirmed if sweep.guard.first_run else None
    is_due = sweep.schedule and all(run.lost for run in runs.open_runs) and status.state in ("on", "narrow")
    return Observation(
        now=now,
        ended=ended,
        open_runs=runs.open_runs,
        unconfirmed={} if unconfirmed is None else unconfirmed.counts,
        attempted_at=runs.attempted_at if is_due else None,
        period=Cron(sweep.schedule, zone).period(now) if sweep.schedule and is_due else None,
    )


@dataclass(slots=True)
class Unavailable:
    """A server that does not answer.

    Attributes:
      server: Such as ``PostgreSQL, database main``, ``Redis`` or ``RabbitMQ``.
      since: Its last answer if known, else when it was first found unavailable.
      database: Its name in the settings, if it is a database.
      is_full: Whether it answers, but its disk or its memory is full.
      shown: What the pages show instead, one text for each part.
    """

    server: str
    database: str | None
    error: str
    since: datetime
    is_full: bool = False
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
      processes: Workers and schedulers by their heartbeats; unknown if these cannot be read, or Redis rejects writes.
      alerts: All active alerts, the gravest first. What could not be read keeps the alerts that it had.
      progress: Progress of the last run of each worker where it is open.
      late_erasures: Erasures that are not done in time; None if the database ``main`` could not be read.
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
    late_erasures: LateErasures | None = None
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
            more = "The page reloads by itself and shows the state when they do. If it stays so: housekeeping doctor."
            return Headline("Unknown: the servers do not answer in time", more=more)
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
      stores: Whether to store which alerts have begun and ended.
    """

    def __init__(
        self,
        settings: Settings,
        sweeps: dict[str, Sweep],
        *,
        only: str | None = None,
        with_progress: bool = True,
        stores: bool = True,
    ) -> None:
        self._settings = settings
        self._sweeps = sweeps
        self._read_sweeps = [sweep for sweep in sweeps.values() if only in (None, sweep.name)]
        self._with_progress = with_progress
        self._stores = stores
        self._erasure_limit = timedelta(seconds=settings.erasure_late_s)
        self._progress: dict[str, ProgressReader] = {}  # by database
        #: Queue -> its lengths, and the actors of its newest dead letters.
        self._dead: dict[str, tuple[QueueLengths, str]] = {}

    def read(self, before: Snapshot | None = None) -> Snapshot:
        """Read all servers, and evaluate the alerts.

        If a server is unavailable, note it and keep its part of the previous snapshot.
        """
        found, before = Snapshot(SYSTEM_CLOCK.now()), before or Snapshot(SYSTEM_CLOCK.now())
        found.read_at = dict(before.read_at)
        settings = self._settings
        found.processes = read_processes(heartbeat_store(settings), found.at)
        if found.processes.rejected is not None and not self._is_alone:
            _note(found, before, "Redis", found.processes.rejected)
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
                ever_ran = history.any_by_a_worker_process()
                clock, read_only = read_database_clock(), why_read_only()
                if name == MAIN:
                    found.late_erasures = late_erasures(self._erasure_limit, clock.server_at)
            read = worker_statuses(sweeps, clock.server_at, self._settings.timezone, found.processes)
            statuses = {each.worker: each for each in read}
            if self._with_progress:
                reader = self._progress.setdefault(name, ProgressReader())
                found.progress |= reader.read(
                    [(sweep, statuses[sweep.name].last_run) for sweep in sweeps], clock.server_at
                )
            found.statuses |= statuses
            found.clocks[name] = clock
            found.read_at[server] = clock.server_at
            if read_only is not None:
                _note(found, before, server, DatabaseUnavailable(f"{server} rejects writes: {read_only}"), name)
        if name not in found.clocks:
            names = {sweep.name for sweep in sweeps}
            found.statuses |= {worker: status for worker, status in before.statuses.items() if worker in names}
            found.unavailable[server].shown.append(_shown(found, "the workers", server))
        return ever_ran

    def _read_queues(self, found: Snapshot, before: Snapshot) -> None:
        found.queues = before.queues
        with _noting(found, before, self._broker, MAIN if self._is_alone else None):
            if self._is_alone:
                found.queues = ticks.queue_lengths({name: sweep.queue for name, sweep in self._sweeps.items()})
            else:
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
                    NO_SPACE if each.is_full else UNAVAILABLE,
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
            *erasure_alerts(found.late_erasures or LateErasures(), self._erasure_limit, found.at),
            *(alert for status in read.values() for alert in status.alarms),
        ]
        judged = partial(self._judges, found, {alert.key for alert in evaluated})
        known = {alert.key: alert for alert in before.alerts}
        alerts = merged(evaluated, known, judged)
        if MAIN in found.clocks:
            with (
                _noting(found, before, database_server(MAIN), MAIN),
                database.using(MAIN),
                translate_postgres_errors(),
                time_limit(STATEMENT_TIME, LOCK_TIME),
            ):
                alerts, error = reconcile(evaluated, judged, found.clocks[MAIN].server_at, stores=self._stores)
                if error is not None and is_disk_full(error):
                    full = Alert(NO_SPACE, f"{DISK_FULL}{error_line(error)}", subject=database_server(MAIN))
                    if full.key not in {alert.key for alert in alerts}:
                        began = known[full.key].since if full.key in known else found.at
                        alerts.append(replace(full, since=began))
        alerts = explained(alerts, self._sweeps, database_server)
        active = Active(alerts)
        stopped = {name: what_stops(self._sweeps[name], active, database_server) for name in found.statuses}
        shown = {"", *(sweep.name for sweep in self._read_sweeps)}
        found.alerts = explained((each for each in alerts if each.worker in shown), self._sweeps, database_server)
        of_worker: dict[str, list[Alert]] = {}
        for alert in found.alerts:
            of_worker.setdefault(alert.worker, []).append(alert)
        found.statuses = {
            name: replace(
                each,
                alarms=of_worker.get(name, []),
                forecast=None if each.forecast is None else each.forecast.stopped_by(stopped[name]),
            )
            for name, each in found.statuses.items()
        }

    def _date_outages(self, found: Snapshot, before: Snapshot) -> None:
        """Set the time of the last answer of each unavailable server; of the first failure if that answer is old.

        The processes of the installation read all servers every half minute. An outage that the last reading has not
        found is newer than that reading.
        """
        new = [each for server, each in found.unavailable.items() if server not in before.unavailable]
        recent = {server: at for server, at in before.read_at.items() if found.at - 2 * INTERVAL < at}
        for each in new:
            each.since = recent.get(each.server, each.since)
        unknown = [each for each in new if each.server not in recent]
        if unknown and MAIN in found.clocks:
            with _noting(found, before, database_server(MAIN), MAIN), database.using(MAIN), translate_postgres_errors():
                evaluated_at = last_evaluation()
            for each in unknown:
                if evaluated_at is not None and found.at - 2 * INTERVAL < evaluated_at < each.since:
                    each.since = evaluated_at
        found.read_at |= {server: found.at for server in self.servers - found.unavailable.keys()}

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
            # The heartbeats raise these alerts, too.
            if alert.name in ("stuck", "overdue"):
                return is_read and found.processes.known
            return is_read and not (alert.name == "backlog" and (alert.worker, "unseen", "") in evaluated)
        if alert.name in (UNAVAILABLE, NO_SPACE):
            return alert.subject in self.servers
        if alert.name == ERASURE_LATE:
            return found.late_erasures is not None
        # A process may know only some of the workers, and so a longer period. A living scheduler is known to all.
        if alert.name == NO_SCHEDULER:
            return any(each.alive for each in found.processes.schedulers)
        is_read = self._broker not in found.unavailable and alert.subject in ("", *found.queues)
        return is_read and (found.processes.known or alert.name == DEAD_LETTERS)

    @property
    def servers(self) -> set[str]:
        """Return the servers that are read, as alerts call them."""
        others = () if self._is_alone else ("Redis", self._broker)
        return {*(database_server(name) for name in by_database(self._read_sweeps)), *others}

    @property
    def _is_alone(self) -> bool:
        """Whether PostgreSQL is the only server."""
        return shared_redis.is_replaced(self._settings)

    def _read_leases(self, found: Snapshot, before: Snapshot) -> None:
        settings = self._settings
        try:
            if not found.clocks:
                raise DatabaseUnavailable("no database has answered")  # and each would be waited for again
            try:
                found.leases = held_leases(lease_store(settings))
                found.leases_complete, found.read_at["leases"] = True, found.at
            except (RedisUnavailable, SettingsError) as error:
                _note(found, before, "Redis", error)
                found.leases = held_leases(None)
                found.leases_note = "Redis is unavailable; these are the leases of open runs in the database."
        except (HousekeepingError, PeeweeException):  # the database is noted already, or will be
            found.leases, found.leases_complete = before.leases, before.leases_complete
            found.leases_note = f"PostgreSQL is unavailable: {_shown(found, 'the leases', 'leases')}."

    @property
    def _broker(self) -> str:
        if self._is_alone:
            return database_server(MAIN)
        if self._settings.on_rabbitmq:
            return "RabbitMQ"
        same = self._settings.broker_url in (None, self._settings.redis_url)
        return "Redis" if same else "Redis of the broker"


def _full_disk(name: str, statuses: Iterable[WorkerStatus]) -> Iterator[Alert]:
    """Yield an alert if the last runs of workers failed because of a full disk of their database."""
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
        _note(found, before, server, error, database_name)


def _note(found: Snapshot, before: Snapshot, server: str, error: Exception, database_name: str | None = None) -> None:
    if server not in found.unavailable:
        is_named = database_name is None or isinstance(error, DatabaseUnavailable)
        text = error_line(error) if is_named else f"{server}: {error_line(error)}"
        earlier = before.unavailable.get(server)
        since = earlier.since if earlier else found.at
        found.unavailable[server] = Unavailable(server, database_name, text, since, isinstance(error, RedisFull))


def _shown(found: Snapshot, part: str, key: str) -> str:
    at = found.read_at.get(key)
    return f"{part} have not been read yet" if at is None else f"{part} are shown as of {format_time(at)} UTC"
