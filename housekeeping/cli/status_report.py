"""Status of all workers, or of one, as ``housekeeping status`` reads it. An unavailable server hides nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from peewee import PeeweeException

from housekeeping.brokers.queues import QueueLengths, queue_lengths
from housekeeping.core.errors import BrokerUnavailable, DatabaseUnavailable, RedisUnavailable
from housekeeping.core.redis.client import redis_client
from housekeeping.core.settings import MAIN, Settings
from housekeeping.database.clock_skew import ClockSkew, read_database_clock
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.alerts import Alert
from housekeeping.sweeps.insight.status import WorkerStatus
from housekeeping.sweeps.insight.statuses import worker_statuses
from housekeeping.sweeps.ledger import run_queries
from housekeeping.sweeps.ledger.acknowledgments import Acknowledged, AlertKey, acknowledged_by, acknowledgments
from housekeeping.sweeps.ledger.lease_admin import HeldLease, held_leases
from housekeeping.sweeps.processes.alerts import never_ran_alerts, process_alerts
from housekeeping.sweeps.processes.heartbeats import Processes, read_processes
from housekeeping.sweeps.registry import by_database
from housekeeping.sweeps.setup_problem import SetupProblem


@dataclass(slots=True)
class DatabaseReport:
    """One database with the status of its workers, or why it could not be read.

    Attributes:
      ever_ran: Whether a worker process has carried out a run; assumed if it could not be read.
    """

    name: str
    workers: list[Sweep]
    clock: ClockSkew | None = None
    statuses: list[WorkerStatus] = field(default_factory=list)
    ever_ran: bool = True
    error: DatabaseUnavailable | None = None


@dataclass(frozen=True, slots=True)
class StatusReport:
    """Status of workers, queues, leases and processes.

    Attributes:
      unreachable: Why queues or leases are missing; None if both were read.
      alerts: Alerts about processes; `WorkerStatus.alarms` has those of the workers.
      has_several: Whether the installation has several databases.
    """

    now: datetime
    databases: list[DatabaseReport]
    statuses: list[WorkerStatus]
    queues: dict[str, QueueLengths]
    leases: list[HeldLease]
    unreachable: str | None
    processes: Processes
    alerts: list[Alert]
    has_several: bool
    acknowledgments: dict[AlertKey, Acknowledged] = field(default_factory=dict)

    def active_alerts(self) -> list[tuple[str, Alert]]:
        """Return the alerts, each with its worker's name, which is empty for an alert of the whole installation."""
        return [
            *(("", alert) for alert in self.alerts),
            *((each.worker, alert) for each in self.statuses for alert in each.alarms),
        ]

    def acknowledged(self, worker: str, alert: Alert) -> Acknowledged | None:
        """Return an alert's acknowledgment; None if it has none."""
        return acknowledged_by(self.acknowledgments, worker, alert.name, alert.since)

    @property
    def problems(self) -> dict[str, SetupProblem]:
        """Why workers are not set up, by name."""
        return {each.worker: each.problem for each in self.statuses if each.problem is not None}

    @property
    def is_complete(self) -> bool:
        """Whether the main database answered."""
        return self.databases[0].error is None

    @property
    def has_alerts(self) -> bool:
        """Whether there is an alert that is not acknowledged, or a database does not answer."""
        if any(self.acknowledged(worker, alert) is None for worker, alert in self.active_alerts()):
            return True
        return any(each.error is not None or (each.clock and each.clock.exceeded) for each in self.databases)

    def as_json(self) -> dict[str, Any]:
        """Return the object of ``housekeeping status --json``."""
        clock = self.databases[0].clock
        document: dict[str, Any] = {
            "now": self.now.isoformat(),
            "clock_skew_s": None if clock is None else clock.seconds,
            "workers": [each.as_json() for each in self.statuses],
            "queues": {name: lengths.as_json() for name, lengths in self.queues.items()},
            "leases": [each.as_json() for each in self.leases],
            "redis": self.unreachable or "ok",
            "processes": [each.as_json() for each in self.processes.listed],
            "alarms": [each.as_json() for each in self.alerts],
        }
        if self.has_several:
            document["databases"] = {
                each.name: "ok" if each.error is None else str(each.error) for each in self.databases
            }
        return document


def read_status(settings: Settings, sweeps: dict[str, Sweep], name: str | None = None) -> StatusReport:
    """Return the status of all workers, or of the worker with this name.

    Raises:
      DatabaseUnavailable: No database answers.
    """
    shown = [sweep for sweep in sweeps.values() if name in (None, sweep.name)]
    databases = [_read(each, workers, settings) for each, workers in by_database(shown).items()]
    answered = [each for each in databases if each.clock is not None]
    if not answered:
        assert databases[0].error is not None
        raise databases[0].error
    assert answered[0].clock is not None
    now = answered[0].clock.server_at
    found = {each.worker: each for database in answered for each in database.statuses}
    queues, leases, unreachable = _read_redis(settings, sorted({sweep.queue for sweep in shown}))
    client = None if settings.redis_url is None else redis_client(settings.redis_url)
    processes = read_processes(client, settings.namespace, now)
    alerts = process_alerts(
        [sweep for sweep in shown if sweep.name not in found or found[sweep.name].problem is None],
        processes,
        {queue: lengths.waiting for queue, lengths in queues.items()},
        now,
        settings.timezone,
        ever_ran=any(each.ever_ran for each in databases),
    )
    for each in found.values():
        if each.problem is None:
            each.alarms.extend(never_ran_alerts(sweeps[each.worker], each, processes, now, settings.timezone))
    return StatusReport(
        now,
        databases,
        [found[sweep.name] for sweep in shown if sweep.name in found],
        queues,
        [each for each in leases if name in (None, each.worker)],
        unreachable,
        processes,
        alerts,
        bool(settings.databases),
        _acknowledgments(),
    )


def _acknowledgments() -> dict[AlertKey, Acknowledged]:
    try:
        with database.using(MAIN), translate_postgres_errors():
            return acknowledgments()
    except (DatabaseUnavailable, PeeweeException):  # the report has it as unavailable
        return {}


def _read(name: str, workers: list[Sweep], settings: Settings) -> DatabaseReport:
    found = DatabaseReport(name, workers)
    try:
        with database.using(name), translate_postgres_errors():
            clock = read_database_clock()
            found.statuses = worker_statuses(workers, clock.server_at, settings.timezone)
            found.ever_ran = run_queries.any_by_a_worker_process()
            found.clock = clock
    except DatabaseUnavailable as error:
        found.error = error
    return found


def _read_redis(settings: Settings, names: list[str]) -> tuple[dict[str, QueueLengths], list[HeldLease], str | None]:
    """Return the queues, the leases, and why one of them is missing."""
    if settings.redis_url is None:
        return {}, [], "HOUSEKEEPING_REDIS_URL is not set: queues and leases are not shown"
    try:
        leases = held_leases(redis_client(settings.redis_url), settings.namespace)
    except RedisUnavailable as error:
        return {}, [], str(error)
    try:
        return queue_lengths(settings, names), leases, None
    except (BrokerUnavailable, RedisUnavailable) as error:
        return {}, leases, str(error)
