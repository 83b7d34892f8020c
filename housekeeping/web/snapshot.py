"""Snapshot of the installation for the pages, read at most every two seconds for all readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from flask import abort
from peewee import PeeweeException

from housekeeping.brokers.queues import QueueLengths, queue_lengths
from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.redis.client import redis_client
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.database.clock_skew import ClockSkew, read_database_clock
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.sweeps.declaration import SetupProblem, Sweep
from housekeeping.sweeps.family_setup import by_problem
from housekeeping.sweeps.insight.alerts import Alert
from housekeeping.sweeps.insight.run_progress import Progress, ProgressReader
from housekeeping.sweeps.insight.status import WorkerStatus
from housekeeping.sweeps.insight.statuses import worker_statuses
from housekeeping.sweeps.ledger import run_queries
from housekeeping.sweeps.ledger.lease_admin import HeldLease, held_leases
from housekeeping.sweeps.processes.alerts import process_alerts
from housekeeping.sweeps.processes.heartbeats import UNKNOWN, Processes, read_processes
from housekeeping.sweeps.registry import by_database

_FRESH_S: Final = 2.0  # maximum age of a snapshot; counting backlogs is expensive
_PATIENCE_S: Final = 1.0  # maximum wait for another thread's read before a page shows the last snapshot


@dataclass(slots=True)
class Snapshot:
    """State of the installation at one time. Not changed after it has been read.

    Attributes:
      statuses: Status by worker, without those that could not be read.
      leases_complete: False if Redis is unavailable and only the database's leases are included.
      errors: What could not be read, one line each.
      clocks: Differences between this machine's clock and those of the databases that answered, by their names.
      processes: Workers and schedulers by their heartbeats.
      alerts: Alerts of the whole installation.
      progress: Progress of the last run of each worker where it is open.
    """

    at: datetime
    statuses: dict[str, WorkerStatus] = field(default_factory=dict)
    queues: dict[str, QueueLengths] = field(default_factory=dict)
    leases: Sequence[HeldLease] = ()
    leases_complete: bool = False
    errors: list[str] = field(default_factory=list)
    clocks: dict[str, ClockSkew] = field(default_factory=dict)
    processes: Processes = UNKNOWN
    alerts: Sequence[Alert] = ()
    progress: dict[str, Progress] = field(default_factory=dict)

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


class SnapshotCache:
    """Cache of the latest snapshot. Thread-safe."""

    def __init__(self, settings: Settings, sweeps: dict[str, Sweep]) -> None:
        self.settings = settings
        self.sweeps = sweeps
        self._reading = threading.Lock()  # held during slow reads; `invalidate` does not need it
        self._last: tuple[Snapshot, float, float] | None = None  # with the times when its read began and ended
        self._changed_at = 0.0
        self._progress: dict[str, ProgressReader] = {}  # by database

    def sweep(self, name: str) -> Sweep:
        """Return the worker, or abort the request with status 404."""
        return self.sweeps.get(name) or abort(404, "no worker has this name")

    def current(self) -> Snapshot:
        """Return a snapshot not older than two seconds, or the last one while another thread's read takes long.

        Unavailable servers are listed in its `errors`.
        """
        if self._last is not None and self._is_fresh(*self._last):
            return self._last[0]
        if not self._reading.acquire(timeout=-1 if self._last is None else _PATIENCE_S):
            assert self._last is not None
            return self._last[0]
        try:
            # Another thread may have just finished.
            if self._last is None or not self._is_fresh(*self._last):
                began = time.monotonic()
                self._last = self._read(), began, time.monotonic()
            return self._last[0]
        finally:
            self._reading.release()

    def _is_fresh(self, snapshot: Snapshot, began: float, ended: float) -> bool:
        # A snapshot may lack a change that was made during its read.
        return began > self._changed_at and time.monotonic() - ended < _FRESH_S

    def invalidate(self) -> None:
        """Make the next call of `current` read again. Does not wait for a read in progress."""
        self._changed_at = time.monotonic()

    def leases(self) -> list[HeldLease]:
        """Return the held leases, uncached.

        Raises:
          RedisUnavailable: Redis does not answer.
          DatabaseUnavailable: PostgreSQL does not answer.
        """
        return held_leases(redis_client(self.settings.require_redis_url()), self.settings.namespace)

    def _read(self) -> Snapshot:
        found, settings = Snapshot(SYSTEM_CLOCK.now()), self.settings
        statuses: dict[str, WorkerStatus] = {}
        for name, sweeps in by_database(self.sweeps.values()).items():
            with _noting(found.errors), database.using(name), translate_postgres_errors():
                found.clocks[name] = clock = read_database_clock()
                for status in worker_statuses(sweeps, clock.server_at, settings.timezone):
                    statuses[status.worker] = status
                reader = self._progress.setdefault(name, ProgressReader())
                read = [(sweep, statuses[sweep.name]) for sweep in sweeps]
                found.progress |= reader.read(read, clock.server_at)
        found.at = next((clock.server_at for clock in found.clocks.values()), found.at)
        found.statuses = {name: statuses[name] for name in self.sweeps if name in statuses}
        with _noting(found.errors, "; queues and dead letters are not shown"):
            found.queues = queue_lengths(settings, sorted({sweep.queue for sweep in self.sweeps.values()}))
        client = None if settings.redis_url is None else redis_client(settings.redis_url)
        found.processes = read_processes(client, settings.namespace, found.at)
        ever_ran: list[bool] = []
        for name in found.clocks:
            with _noting(found.errors), database.using(name), translate_postgres_errors():
                ever_ran.append(run_queries.any_by_a_worker_process())
        found.alerts = process_alerts(
            [sweep for name, sweep in self.sweeps.items() if name not in found.problems],
            found.processes,
            {name: lengths.waiting for name, lengths in found.queues.items()},
            found.at,
            settings.timezone,
            ever_ran=any(ever_ran) or not ever_ran,  # assumed if no ledger can be read
        )
        with _noting(found.errors):
            found.leases, found.leases_complete = self.leases(), True
        if not found.leases_complete:
            with _noting(found.errors):
                found.leases = held_leases(None, settings.namespace)
        return found


@contextmanager
def _noting(errors: list[str], consequence: str = "") -> Iterator[None]:
    """Record why the block failed, unless a reason is already recorded."""
    try:
        yield
    except (HousekeepingError, PeeweeException) as error:
        line = error_line(error)
        if line not in " ".join(errors):
            errors.append(f"{line}{consequence}")
