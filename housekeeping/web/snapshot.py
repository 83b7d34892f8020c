"""Snapshot of the installation for the pages, read at most every two seconds for all readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from peewee import PeeweeException

from housekeeping.brokers.queues import QueueLengths, queue_lengths
from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.redis_client import redis_client
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.database.clock_skew import ClockSkew, read_database_clock
from housekeeping.database.connection import translate_postgres_errors
from housekeeping.sweeps.declaration import SetupProblem, Sweep
from housekeeping.sweeps.family_setup import by_problem
from housekeeping.sweeps.insight.alerts import Alert
from housekeeping.sweeps.insight.run_state import HEARTBEAT_AGE_S
from housekeeping.sweeps.insight.status import WorkerStatus, worker_status
from housekeeping.sweeps.insight.throughput import Ended, last_ended
from housekeeping.sweeps.ledger import runs
from housekeeping.sweeps.ledger.lease_admin import HeldLease, held_leases
from housekeeping.sweeps.ledger.models import Run, SwitchChange
from housekeeping.sweeps.processes.alerts import process_alerts
from housekeeping.sweeps.processes.liveness import UNKNOWN, Processes, read_processes

_FRESH_S: Final = 2.0  # maximum age of a snapshot; counting backlogs is expensive
_PATIENCE_S: Final = 1.0  # maximum wait for another thread's read before a page shows the last snapshot
RUNS: Final = 50  # per worker, in charts and lists


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of the installation at one time.

    Attributes:
      statuses: Status by worker, without those that could not be read.
      runs: The last runs by worker, oldest first.
      leases_complete: False if Redis is unavailable and only the database's leases are included.
      errors: What could not be read, one line each.
      clock: Difference between this machine's clock and the database's; `None` if unknown.
      processes: Workers and schedulers by their heartbeats.
      alerts: Alerts of the whole installation.
    """

    at: datetime
    statuses: dict[str, WorkerStatus]
    runs: dict[str, list[Ended]]
    queues: dict[str, QueueLengths]
    leases: Sequence[HeldLease]
    leases_complete: bool
    errors: list[str]
    clock: ClockSkew | None = None
    processes: Processes = UNKNOWN
    alerts: Sequence[Alert] = ()

    @property
    def problems(self) -> dict[str, SetupProblem]:
        """Return the setup problem of each worker that has one."""
        return {name: each.problem for name, each in self.statuses.items() if each.problem is not None}

    @property
    def not_set_up(self) -> dict[SetupProblem, list[str]]:
        """Return the workers by setup problem."""
        return by_problem(self.problems)

    @property
    def dead(self) -> int:
        """Return the number of dead letters of all queues."""
        return sum(lengths.dead for lengths in self.queues.values())


class SnapshotCache:
    """Cache of the latest snapshot. Thread-safe."""

    def __init__(self, settings: Settings, sweeps: dict[str, Sweep]) -> None:
        self.settings = settings
        self.sweeps = sweeps
        self._reading = threading.Lock()  # held during slow reads; `invalidate` does not need it
        self._lock = threading.Lock()  # guards the fields below
        self._last: Snapshot | None = None
        self._fresh_since: float | None = None
        self._changes = 0

    def current(self) -> Snapshot:
        """Return a snapshot not older than two seconds, or the last one while another thread's read takes long.

        Unavailable servers are listed in its `errors`.
        """
        fresh, last = self._cached()
        if fresh is not None:
            return fresh
        if not self._reading.acquire(timeout=-1 if last is None else _PATIENCE_S):
            assert last is not None
            return last
        try:
            # Another thread may have just finished.
            return self._cached()[0] or self._refresh()
        finally:
            self._reading.release()

    def invalidate(self) -> None:
        """Make the next call of `current` read again. Does not wait for a read in progress."""
        with self._lock:
            self._fresh_since = None
            self._changes += 1

    def _cached(self) -> tuple[Snapshot | None, Snapshot | None]:
        """Return the snapshot if it is fresh, and the last snapshot."""
        with self._lock:
            fresh = self._fresh_since is not None and time.monotonic() - self._fresh_since < _FRESH_S
            return self._last if fresh else None, self._last

    def _refresh(self) -> Snapshot:
        with self._lock:
            changes = self._changes
        snapshot = self._read()
        with self._lock:
            self._last = snapshot
            # The snapshot may lack a change that was made during the read.
            self._fresh_since = time.monotonic() if changes == self._changes else None
        return snapshot

    def leases(self) -> list[HeldLease]:
        """Return the held leases, uncached.

        Raises:
          RedisUnavailable: Redis does not answer.
          DatabaseUnavailable: PostgreSQL does not answer.
        """
        return held_leases(redis_client(self.settings.require_redis_url()), self.settings.namespace)

    def _read(self) -> Snapshot:
        snapshot = Snapshot(SYSTEM_CLOCK.now(), {}, {}, {}, [], False, [])
        try:
            with translate_postgres_errors():
                clock = read_database_clock()
                snapshot = replace(snapshot, at=clock.server_at, clock=clock)
                for name, sweep in self.sweeps.items():
                    status = worker_status(sweep, snapshot.at, self.settings.timezone)
                    snapshot.statuses[name], snapshot.runs[name] = status, last_ended(sweep, RUNS)
        except (HousekeepingError, PeeweeException) as error:
            snapshot.errors.append(error_line(error))
        try:
            names = sorted({sweep.queue for sweep in self.sweeps.values()})
            snapshot = replace(snapshot, queues=queue_lengths(self.settings, names))
        except HousekeepingError as error:
            snapshot.errors.append(f"{error_line(error)}; queues and dead letters are not shown")
        return self._with_leases(self._with_processes(snapshot))

    def _with_processes(self, snapshot: Snapshot) -> Snapshot:
        url = self.settings.redis_url
        client = None if url is None else redis_client(url)
        processes = read_processes(client, self.settings.namespace, snapshot.at)
        alerts = process_alerts(
            [sweep for name, sweep in self.sweeps.items() if name not in snapshot.problems],
            processes,
            {name: lengths.waiting for name, lengths in snapshot.queues.items()},
            snapshot.at,
            self.settings.timezone,
            ever_ran=_have_processes_run(),
        )
        return replace(snapshot, processes=processes, alerts=alerts)

    def _with_leases(self, snapshot: Snapshot) -> Snapshot:
        try:
            return replace(snapshot, leases=self.leases(), leases_complete=True)
        except (HousekeepingError, PeeweeException) as error:
            if error_line(error) not in " ".join(snapshot.errors):
                snapshot.errors.append(error_line(error))
        try:
            return replace(snapshot, leases=held_leases(None, self.settings.namespace))
        except (HousekeepingError, PeeweeException):  # listed in `errors` already
            return snapshot


def _rows() -> Any:
    return Run.select(Run, HEARTBEAT_AGE_S.alias("heartbeat_age_s"))


def last_rows(worker: str, number: int = RUNS) -> list[Any]:
    """Return the worker's newest rows of the ledger, including skipped and missed ticks."""
    rows: Any = _rows().where(Run.worker == worker).order_by(Run.id.desc()).limit(number)
    return list(rows)


def run_row(run_id: int) -> Any:
    """Return a row of the ledger, or `None`."""
    return _rows().where(Run.id == run_id).first()


def attempts_of(run: Any, number: int = 100) -> list[Any]:
    """Return all attempts at the run's message or tick, oldest first, including the run itself."""
    same = Run.id == run.id
    if run.message_id is not None:
        same |= Run.message_id == run.message_id
    if run.tick is not None:
        same |= Run.tick == run.tick
    rows: Any = _rows().where((Run.worker == run.worker) & same).order_by(Run.id).limit(number)
    return list(rows)


def last_changes(worker: str, number: int = 10) -> list[Any]:
    """Return the worker's override changes, newest first."""
    rows: Any = (
        SwitchChange.select().where(SwitchChange.worker == worker).order_by(SwitchChange.id.desc()).limit(number)
    )
    return list(rows)


def _have_processes_run() -> bool:
    """Return whether the ledger has a run of a worker process; assumed if it cannot be read."""
    try:
        with translate_postgres_errors():
            return runs.any_by_a_worker_process()
    except (HousekeepingError, PeeweeException):
        return True
