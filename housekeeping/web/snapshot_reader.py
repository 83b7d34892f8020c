"""Reader of everything that the pages show. If a server does not answer, its last values stay, with their time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from peewee import PeeweeException

from housekeeping.brokers.queues import QueueLengths, queue_lengths
from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import DatabaseUnavailable, HousekeepingError, RedisUnavailable, SettingsError
from housekeeping.core.redis.client import redis_client
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import MAIN, Settings
from housekeeping.database.clock_skew import ClockSkew, read_database_clock
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.database.time_limit import time_limit
from housekeeping.presentation.formatting import format_time
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.family_setup import by_problem
from housekeeping.sweeps.insight.alerts import Alert
from housekeeping.sweeps.insight.run_progress import Progress, ProgressReader
from housekeeping.sweeps.insight.status import WorkerStatus
from housekeeping.sweeps.insight.statuses import worker_statuses
from housekeeping.sweeps.ledger import run_queries
from housekeeping.sweeps.ledger.acknowledgments import Acknowledged, AlertKey, acknowledgments
from housekeeping.sweeps.ledger.lease_admin import HeldLease, held_leases
from housekeeping.sweeps.processes.alerts import never_ran_alerts, process_alerts
from housekeeping.sweeps.processes.heartbeats import UNKNOWN, Processes, read_processes
from housekeeping.sweeps.registry import by_database
from housekeeping.sweeps.setup_problem import SetupProblem
from housekeeping.web.alert_groups import AlertGroup, group_alerts

#: A page must not wait for a lock on the ledger. Its probes take milliseconds.
STATEMENT_TIME: Final = timedelta(seconds=2)
LOCK_TIME: Final = timedelta(seconds=0.3)


@dataclass(slots=True)
class Unavailable:
    """A server that does not answer.

    Attributes:
      server: Such as ``PostgreSQL, database main``, ``Redis`` or ``RabbitMQ``.
      since: When it was first found unavailable.
      shown: What the pages show instead, one text for each part.
    """

    server: str
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
      processes: Workers and schedulers by their heartbeats.
      alerts: Alerts of the whole installation.
      alert_groups: All active alerts, grouped by cause.
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
    acknowledgments: dict[AlertKey, Acknowledged] = field(default_factory=dict)
    alert_groups: list[AlertGroup] = field(default_factory=list)
    progress: dict[str, Progress] = field(default_factory=dict)
    read_at: dict[str, datetime] = field(default_factory=dict)
    late_s: float = 0.0

    @property
    def errors(self) -> list[str]:
        """Return what could not be read, one line for each server."""
        return [str(each) for each in self.unavailable.values()]

    @property
    def unknown_alerts(self) -> list[AlertGroup]:
        """Return the groups of alerts that are not acknowledged."""
        return [each for each in self.alert_groups if each.acknowledged is None]

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


class SnapshotReader:
    """Reader of snapshots. Only one thread may read at a time."""

    def __init__(self, settings: Settings, sweeps: dict[str, Sweep]) -> None:
        self._settings = settings
        self._sweeps = sweeps
        self._progress: dict[str, ProgressReader] = {}  # by database

    def read(self, before: Snapshot | None) -> Snapshot:
        """Read all servers. If one is unavailable, note it and keep its part of the previous snapshot."""
        found, before = Snapshot(SYSTEM_CLOCK.now()), before or Snapshot(SYSTEM_CLOCK.now())
        found.read_at = dict(before.read_at)
        for name, sweeps in by_database(self._sweeps.values()).items():
            self._read_database(name, sweeps, found, before)
        found.at = next((clock.server_at for clock in found.clocks.values()), found.at)
        found.statuses = {name: found.statuses[name] for name in self._sweeps if name in found.statuses}
        self._read_queues(found, before)
        self._read_processes(found)
        self._group_alerts(found, before)
        self._read_leases(found, before)
        return found

    def _read_database(self, name: str, sweeps: Sequence[Sweep], found: Snapshot, before: Snapshot) -> None:
        server = database_server(name)
        with _noting(found, before, server), database.using(name), translate_postgres_errors():
            _probe_ledger()
            clock = read_database_clock()
            statuses = {each.worker: each for each in worker_statuses(sweeps, clock.server_at, self._settings.timezone)}
            reader = self._progress.setdefault(name, ProgressReader())
            found.progress |= reader.read([(sweep, statuses[sweep.name]) for sweep in sweeps], clock.server_at)
            found.statuses |= statuses
            found.clocks[name] = clock
            found.read_at[server] = clock.server_at
        if name not in found.clocks:
            names = {sweep.name for sweep in sweeps}
            found.statuses |= {worker: status for worker, status in before.statuses.items() if worker in names}
            found.unavailable[server].shown.append(_shown(found, "the workers", server))

    def _read_queues(self, found: Snapshot, before: Snapshot) -> None:
        found.queues = before.queues
        with _noting(found, before, self._broker):
            found.queues = queue_lengths(self._settings, sorted({sweep.queue for sweep in self._sweeps.values()}))
            found.read_at["queues"] = found.at
        if self._broker in found.unavailable:
            found.unavailable[self._broker].shown.append(_shown(found, "the queues", "queues"))

    def _read_processes(self, found: Snapshot) -> None:
        settings = self._settings
        client = None if settings.redis_url is None else redis_client(settings.redis_url)
        found.processes = read_processes(client, settings.namespace, found.at)
        ever_ran: list[bool] = []
        for name in found.clocks:
            with _noting(found, found, database_server(name)), database.using(name), translate_postgres_errors():
                ever_ran.append(run_queries.any_by_a_worker_process())
        found.alerts = process_alerts(
            [sweep for name, sweep in self._sweeps.items() if name not in found.problems],
            found.processes,
            {name: lengths.waiting for name, lengths in found.queues.items()},
            found.at,
            settings.timezone,
            ever_ran=any(ever_ran) or not ever_ran,  # assumed if no ledger can be read
        )
        for name, status in found.statuses.items():
            if status.database in found.clocks and status.problem is None:
                sweep = self._sweeps[name]
                status.alarms.extend(never_ran_alerts(sweep, status, found.processes, found.at, settings.timezone))

    def _group_alerts(self, found: Snapshot, before: Snapshot) -> None:
        found.acknowledgments = before.acknowledgments
        if MAIN in found.clocks:
            with _noting(found, before, database_server(MAIN)), database.using(MAIN), translate_postgres_errors():
                found.acknowledgments = acknowledgments()
        active = [("", alert) for alert in found.alerts]
        active += [(name, alert) for name, status in found.statuses.items() for alert in status.alarms]
        found.alert_groups = group_alerts(active, found.acknowledgments)

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


def database_server(name: str) -> str:
    """Return how the pages call a database."""
    return f"PostgreSQL, database {name}"


def _probe_ledger() -> None:
    """Raise an error at once if the ledger is locked. Its own queries would wait for ten seconds each."""
    with time_limit(STATEMENT_TIME, LOCK_TIME):
        run_queries.any_by_a_worker_process()


@contextmanager
def _noting(found: Snapshot, before: Snapshot, server: str) -> Iterator[None]:
    """Note in the snapshot that the server is unavailable if the block fails."""
    try:
        yield
    except (HousekeepingError, PeeweeException) as error:
        text, is_named = (
            error_line(error),
            isinstance(error, DatabaseUnavailable) or not server.startswith("PostgreSQL"),
        )
        _note(found, before, server, text if is_named else f"{server}: {text}")


def _note(found: Snapshot, before: Snapshot, server: str, error: str) -> None:
    if server not in found.unavailable:
        earlier = before.unavailable.get(server)
        found.unavailable[server] = Unavailable(server, error, earlier.since if earlier else found.at)


def _shown(found: Snapshot, part: str, key: str) -> str:
    at = found.read_at.get(key)
    return f"{part} have not been read yet" if at is None else f"{part} are shown as of {format_time(at)} UTC"
