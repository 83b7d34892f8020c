"""Helpers for the tests of throttles, pace and breaker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import pytest

from housekeeping import Sweep
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.internals.engine import DbHealth, RunResult, run_sweep, speed
from tests.internals.ledger import NOW, Counts, Run
from tests.internals.workers import status_sweep as sweep

#: Due by the clock that tests set, and by any real one.
DUE: Final = "timestamptz '2025-12-31 00:00:00+00' + interval '1 millisecond' * n"
LONG_DUE: Final = "timestamptz '2025-12-30 00:00:00+00'"
#: One that begins at the front after a run that its limits cut short, but not after one that was stopped.
SMALL: Final = changed(sweep, batch=10, resume="interrupted")
WELL: Final = DbHealth(0.0, 0, False)


class Impatient(threading.Event):
    """Ends a run as usual; what is waited for it passes at once, by a clock that is set.

    Attributes:
      waits: The seconds of each wait.
    """

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self._clock.advance(timedelta(seconds=timeout))
        return self.is_set()


class Told:
    """Health of the database that is each of the given values once, and then always the last one.

    Attributes:
      looks: For which tables it was asked, each time.
    """

    def __init__(self, *signs: DbHealth) -> None:
        self._signs = list(signs)
        self.looks: list[list[str]] = []

    def __call__(self, tables: Sequence[str]) -> DbHealth:
        self.looks.append(list(tables))
        return self._signs.pop(0) if len(self._signs) > 1 else self._signs[0]


def run_told(sweep: Sweep, *, health: Callable[[Sequence[str]], DbHealth], **options: Any) -> RunResult:
    """Run a sweep whose throttle is told this health of the database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "read_health", health)
        return run_sweep(sweep, **options)


class Sizes:
    """Told the counts after each batch: how many rows each batch deleted."""

    def __init__(self) -> None:
        self._before = 0
        self.seen: list[int] = []

    def __call__(self, counts: Counts) -> None:
        self.seen.append(counts["deleted_rows"] - self._before)
        self._before = counts["deleted_rows"]


def past_runs(
    runs: int,
    processed: int,
    outcome: str = "done",
    reason: str | None = None,
    *,
    worker: str = SMALL.name,
    counted_as: str = "deleted_rows",
    **counts: Any,
) -> None:
    """Add runs that ended before, each of which processed this many rows."""
    for _ in range(runs):
        Run.create(
            worker=worker,
            trigger="schedule",
            started_at=NOW,
            heartbeat_at=NOW,
            finished_at=NOW,
            outcome=outcome,
            reason=reason,
            counts={counted_as: processed, **counts},
        )
