"""What the pages show, asked for at most once in a while, however many look."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from peewee import PeeweeException

from housekeeping.foundation.db import one_line, reaching_postgres
from housekeeping.foundation.errors import HousekeepingError
from housekeeping.foundation.settings import Settings
from housekeeping.queues import QueueLengths, held_leases, queue_lengths
from housekeeping.sweeps.declaration import Sweep
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
      trouble: What could not be asked, in one line each.
    """

    at: datetime
    overviews: dict[str, Overview]
    runs: dict[str, list[Ended]]
    queues: dict[str, QueueLengths]
    leases: Sequence[dict[str, Any]]
    trouble: list[str]


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

    def _look(self) -> Facts:
        at = datetime.now(UTC)
        facts = Facts(at, {}, {}, {}, [], [])
        try:
            with reaching_postgres():
                for name, sweep in self.sweeps.items():
                    facts.overviews[name] = overview(sweep, at, self.settings.timezone)
                    facts.runs[name] = last_ended(sweep, RUNS)
        except (HousekeepingError, PeeweeException) as error:
            facts.trouble.append(one_line(error))
        try:
            queues = queue_lengths(self.settings, sorted({sweep.queue for sweep in self.sweeps.values()}))
            leases = held_leases(self.settings)
        except HousekeepingError as error:
            facts.trouble.append(one_line(error))
            return facts
        return Facts(at, facts.overviews, facts.runs, queues, leases, facts.trouble)


def last_rows(worker: str, number: int = RUNS) -> list[Any]:
    """The worker's newest rows of the ledger, skipped and missed ones too."""
    rows: Any = Run.select().where(Run.worker == worker).order_by(Run.id.desc()).limit(number)
    return list(rows)


def run_row(run_id: int) -> Any:
    """One row of the ledger; None when there is none."""
    return Run.select().where(Run.id == run_id).first()


def last_changes(worker: str, number: int = 10) -> list[Any]:
    """What operators said of the worker, newest first."""
    rows: Any = (
        SwitchChange.select().where(SwitchChange.worker == worker).order_by(SwitchChange.id.desc()).limit(number)
    )
    return list(rows)
