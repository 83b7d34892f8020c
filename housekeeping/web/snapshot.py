"""What the pages show, asked for at most once in a while, however many look."""

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
from housekeeping.sweeps.ledger.lease_admin import HeldLease, held_leases
from housekeeping.sweeps.ledger.models import Run, SwitchChange
from housekeeping.sweeps.processes.alerts import process_alerts
from housekeeping.sweeps.processes.liveness import UNKNOWN, Processes, read_processes

_FRESH_S: Final = 2.0  # a backlog is counted no more often than that
_PATIENCE_S: Final = 1.0  # that a page waits for another's look, before it shows what was seen last
RUNS: Final = 50  # of a worker, in charts and lists


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything of the first page, at one moment.

    Attributes:
      overviews: By worker; those that could be seen.
      runs: The last runs of each, oldest first.
      leases_whole: False: only what the database knows of leases, because Redis was away.
      trouble: What could not be asked, in one line each.
      clock: The database's clock beside this machine's; null: it could not be asked.
      processes: Workers and schedulers by their heartbeats.
      alarms: Those of the whole installation.
    """

    at: datetime
    overviews: dict[str, WorkerStatus]
    runs: dict[str, list[Ended]]
    queues: dict[str, QueueLengths]
    leases: Sequence[HeldLease]
    leases_whole: bool
    trouble: list[str]
    clock: ClockSkew | None = None
    processes: Processes = UNKNOWN
    alarms: Sequence[Alert] = ()

    @property
    def problems(self) -> dict[str, SetupProblem]:
        """Why workers are not set up, by name."""
        return {name: each.problem for name, each in self.overviews.items() if each.problem is not None}

    @property
    def not_set_up(self) -> dict[SetupProblem, list[str]]:
        """The workers that share each problem."""
        return by_problem(self.problems)

    @property
    def dead(self) -> int:
        """Dead letters of all queues."""
        return sum(lengths.dead for lengths in self.queues.values())


class SnapshotCache:
    """Looks at the workers, and remembers for a moment what it saw. Safe to share between threads."""

    def __init__(self, settings: Settings, sweeps: dict[str, Sweep]) -> None:
        self.settings = settings
        self.sweeps = sweeps
        self._looking = threading.Lock()  # held as long as a database may take: never waited for by who has changed
        self._lock = threading.Lock()  # of the fields below
        self._seen: Snapshot | None = None
        self._fresh_since: float | None = None
        self._changes = 0

    def look(self) -> Snapshot:
        """The facts, not older than two seconds, or while another's look takes long the last there are.

        Never raises for what is away.
        """
        fresh, last = self._known()
        if fresh is not None:
            return fresh
        if not self._looking.acquire(timeout=-1 if last is None else _PATIENCE_S):
            assert last is not None
            return last
        try:
            # Another may just have looked.
            return self._known()[0] or self._look_anew()
        finally:
            self._looking.release()

    def forget(self) -> None:
        """Look anew at the next question: something was changed. Waits for no look."""
        with self._lock:
            self._fresh_since = None
            self._changes += 1

    def _known(self) -> tuple[Snapshot | None, Snapshot | None]:
        """What was seen if that is fresh, and what was seen last."""
        with self._lock:
            fresh = self._fresh_since is not None and time.monotonic() - self._fresh_since < _FRESH_S
            return self._seen if fresh else None, self._seen

    def _look_anew(self) -> Snapshot:
        with self._lock:
            changes = self._changes
        seen = self._look()
        with self._lock:
            self._seen = seen
            # What was changed while it looked, it may not have seen.
            self._fresh_since = time.monotonic() if changes == self._changes else None
        return seen

    def leases(self) -> list[HeldLease]:
        """Who holds what, asked now.

        Raises:
          RedisUnavailable: When Redis does not answer.
          DatabaseUnavailable: When PostgreSQL does not answer.
        """
        return held_leases(redis_client(self.settings.require_redis_url()), self.settings.namespace)

    def _look(self) -> Snapshot:
        facts = Snapshot(SYSTEM_CLOCK.now(), {}, {}, {}, [], False, [])
        try:
            with translate_postgres_errors():
                clock = read_database_clock()
                facts = replace(facts, at=clock.server_at, clock=clock)
                for name, sweep in self.sweeps.items():
                    seen, runs = worker_status(sweep, facts.at, self.settings.timezone), last_ended(sweep, RUNS)
                    facts.overviews[name], facts.runs[name] = seen, runs
        except (HousekeepingError, PeeweeException) as error:
            facts.trouble.append(error_line(error))
        try:
            names = sorted({sweep.queue for sweep in self.sweeps.values()})
            facts = replace(facts, queues=queue_lengths(self.settings, names))
        except HousekeepingError as error:
            facts.trouble.append(f"{error_line(error)}; queues and dead letters are not shown")
        return self._with_leases(self._with_processes(facts))

    def _with_processes(self, facts: Snapshot) -> Snapshot:
        url = self.settings.redis_url
        client = None if url is None else redis_client(url)
        processes = read_processes(client, self.settings.namespace, facts.at)
        alarms = process_alerts(
            [sweep for name, sweep in self.sweeps.items() if name not in facts.problems],
            processes,
            {name: lengths.waiting for name, lengths in facts.queues.items()},
            facts.at,
            self.settings.timezone,
            # Where the ledger could not be read, nothing is said of what never was.
            ever_ran=not facts.overviews or any(each.last_run for each in facts.overviews.values()),
        )
        return replace(facts, processes=processes, alarms=alarms)

    def _with_leases(self, facts: Snapshot) -> Snapshot:
        try:
            return replace(facts, leases=self.leases(), leases_whole=True)
        except (HousekeepingError, PeeweeException) as error:
            if error_line(error) not in " ".join(facts.trouble):
                facts.trouble.append(error_line(error))
        try:
            return replace(facts, leases=held_leases(None, self.settings.namespace))
        except (HousekeepingError, PeeweeException):  # said already
            return facts


def _rows() -> Any:
    return Run.select(Run, HEARTBEAT_AGE_S.alias("heartbeat_age_s"))


def last_rows(worker: str, number: int = RUNS) -> list[Any]:
    """The worker's newest rows of the ledger, skipped and missed ones too."""
    rows: Any = _rows().where(Run.worker == worker).order_by(Run.id.desc()).limit(number)
    return list(rows)


def run_row(run_id: int) -> Any:
    """One row of the ledger; None when there is none."""
    return _rows().where(Run.id == run_id).first()


def attempts_beside(run: Any, number: int = 100) -> list[Any]:
    """All rows of the same message, or at the same tick of the same worker, oldest first; itself among them."""
    same = Run.id == run.id
    if run.message_id is not None:
        same |= Run.message_id == run.message_id
    if run.tick is not None:
        same |= Run.tick == run.tick
    rows: Any = _rows().where((Run.worker == run.worker) & same).order_by(Run.id).limit(number)
    return list(rows)


def last_changes(worker: str, number: int = 10) -> list[Any]:
    """What operators said of the worker, newest first."""
    rows: Any = (
        SwitchChange.select().where(SwitchChange.worker == worker).order_by(SwitchChange.id.desc()).limit(number)
    )
    return list(rows)
