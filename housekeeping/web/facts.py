"""What the pages show, asked for at most once in a while, however many look."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from peewee import PeeweeException

from housekeeping.foundation.db import one_line, reaching_postgres
from housekeeping.foundation.errors import HousekeepingError
from housekeeping.foundation.redis_client import redis_client
from housekeeping.foundation.settings import Settings
from housekeeping.queues import QueueLengths, queue_lengths
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.held_leases import HeldLease, held_leases
from housekeeping.sweeps.overview import Overview, overview
from housekeeping.sweeps.own_tables import Run, SwitchChange
from housekeeping.sweeps.rates import Ended, last_ended

_FRESH_S: Final = 2.0  # a backlog is counted no more often than that
RUNS: Final = 50  # of a worker, in charts and lists


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything of the first page, at one moment.

    Attributes:
      overviews: By worker; those that could be seen.
      runs: The last runs of each, oldest first.
      leases_whole: False: only what the database knows of leases, because Redis was away.
      trouble: What could not be asked, in one line each.
    """

    at: datetime
    overviews: dict[str, Overview]
    runs: dict[str, list[Ended]]
    queues: dict[str, QueueLengths]
    leases: Sequence[HeldLease]
    leases_whole: bool
    trouble: list[str]

    @property
    def dead(self) -> int:
        """Dead letters of all queues."""
        return sum(lengths.dead for lengths in self.queues.values())


class Observatory:
    """Looks at the workers, and remembers for a moment what it saw. Safe to share between threads."""

    def __init__(self, settings: Settings, sweeps: dict[str, Sweep]) -> None:
        self.settings = settings
        self.sweeps = sweeps
        self._lock = threading.Lock()
        self._seen: Facts | None = None
        self._seen_at = -_FRESH_S

    def look(self) -> Facts:
        """The facts, not older than two seconds; never raises for what is away."""
        with self._lock:
            if self._seen is None or time.monotonic() - self._seen_at >= _FRESH_S:
                self._seen = self._look()
                self._seen_at = time.monotonic()
            return self._seen

    def forget(self) -> None:
        """Look anew at the next question: something was changed."""
        with self._lock:
            self._seen = None

    def leases(self) -> list[HeldLease]:
        """Who holds what, asked now.

        Raises:
          RedisUnavailable: When Redis does not answer.
          DatabaseUnavailable: When PostgreSQL does not answer.
        """
        return held_leases(redis_client(self.settings.require_redis_url()), self.settings.namespace)

    def _look(self) -> Facts:
        facts = Facts(datetime.now(UTC), {}, {}, {}, [], False, [])
        try:
            with reaching_postgres():
                for name, sweep in self.sweeps.items():
                    seen, runs = overview(sweep, facts.at, self.settings.timezone), last_ended(sweep, RUNS)
                    facts.overviews[name], facts.runs[name] = seen, runs
        except (HousekeepingError, PeeweeException) as error:
            facts.trouble.append(one_line(error))
        try:
            names = sorted({sweep.queue for sweep in self.sweeps.values()})
            facts = replace(facts, queues=queue_lengths(self.settings, names))
        except HousekeepingError as error:
            facts.trouble.append(f"{one_line(error)}; queues and dead letters are not shown")
        return self._with_leases(facts)

    def _with_leases(self, facts: Facts) -> Facts:
        try:
            return replace(facts, leases=self.leases(), leases_whole=True)
        except (HousekeepingError, PeeweeException) as error:
            if one_line(error) not in " ".join(facts.trouble):
                facts.trouble.append(one_line(error))
        try:
            return replace(facts, leases=held_leases(None, self.settings.namespace))
        except (HousekeepingError, PeeweeException):  # said already
            return facts


def last_rows(worker: str, number: int = RUNS) -> list[Any]:
    """The worker's newest rows of the ledger, skipped and missed ones too."""
    rows: Any = Run.select().where(Run.worker == worker).order_by(Run.id.desc()).limit(number)
    return list(rows)


def run_row(run_id: int) -> Any:
    """One row of the ledger; None when there is none."""
    return Run.select().where(Run.id == run_id).first()


def attempts_beside(run: Any, number: int = 100) -> list[Any]:
    """All rows of the same message, or at the same tick of the same worker, oldest first; itself among them."""
    same = Run.id == run.id
    if run.message_id is not None:
        same |= Run.message_id == run.message_id
    if run.tick is not None:
        same |= Run.tick == run.tick
    rows: Any = Run.select().where((Run.worker == run.worker) & same).order_by(Run.id).limit(number)
    return list(rows)


def last_changes(worker: str, number: int = 10) -> list[Any]:
    """What operators said of the worker, newest first."""
    rows: Any = (
        SwitchChange.select().where(SwitchChange.worker == worker).order_by(SwitchChange.id.desc()).limit(number)
    )
    return list(rows)
