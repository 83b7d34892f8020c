"""Request and progress of one run, which every phase of the run reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from housekeeping.core.clock import SYSTEM_CLOCK, Clock, ServerClock
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.counts import initial_counts
from housekeeping.sweeps.engine.failures.rejections import Rejections
from housekeeping.sweeps.ledger.runs import Counts, Resume, Trigger
from housekeeping.sweeps.limits.db_health import HealthSource
from housekeeping.sweeps.stages.stage import Position, PreflightResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What a run is asked to do; the parameters of `run_sweep` and the message it runs for.

    Attributes:
      stopping: Ends the run after the current batch once it is set.
      max_rows: The most rows that the run may process; None for any number.
      resumes: The run whose cursor this one takes over, whatever its outcome; None leaves that to `resume`.
      noted: What the run was asked to do, written into its counts for a later run to read.
      returns_on_shutdown: Whether a run that `Shutdown` interrupts returns its result instead of raising again.
    """

    sweep: Sweep
    argument: Any = None
    message_id: str | None = None
    tick: datetime | None = None
    trigger: Trigger = "cli"
    stopping: threading.Event
    returns_on_shutdown: bool = False
    force: bool = False
    confirmed: bool = False
    max_rows: int | None = None
    resumes: int | None = None
    noted: Counts = field(default_factory=dict)
    clock: Clock | None = None
    health: HealthSource | None = None
    on_batch: Callable[[Counts], None] | None = None
    on_begin: Callable[[int], None] | None = None

    @property
    def resume(self) -> Resume:
        """Which earlier runs this one resumes."""
        # The cursor of a run with another argument says nothing about this one.
        if self.sweep.argument_name is not None or self.sweep.ignore_cursor:
            return "never"
        return "cut_short" if self.sweep.resume_after_limit else "interrupted"


@dataclass(slots=True)
class RunProgress:
    """What a run has done so far. It stays readable when an exception ends the run.

    Attributes:
      run_id: The run's row in the ledger; None before it is written.
      clock: The given clock. Without one, the database's clock as soon as it is known.
      counts: The counts that are committed.
      position: Where the last committed batch ended.
      predicate: Fingerprint of the predicate, to be written once the run has completed; None if it is known.
      rejected_before: Whether an earlier run has left rejected rows.
      saw_everything: Whether the run has looked at every stale row.
    """

    clock: Clock
    started_at: datetime
    counts: Counts
    preflight: PreflightResult = field(default_factory=PreflightResult)
    run_id: int | None = None
    position: Position | None = None
    rejections: Rejections | None = None
    predicate: str | None = None
    rejected_before: bool = False
    saw_everything: bool = False

    @classmethod
    def of(cls, request: RunRequest) -> RunProgress:
        clock = request.clock or SYSTEM_CLOCK
        return cls(clock, clock.now(), {**initial_counts(request.sweep), **request.noted})

    def carry_out_preflight(self, sweep: Sweep) -> None:
        """Do the sweep's work that precedes its lease."""
        if sweep.before_lease is not None:
            self.preflight = sweep.before_lease.carry_out()
            self.counts |= self.preflight.counts

    def recorded(self, request: RunRequest, run_id: int, started_at: datetime) -> None:
        """Store id and start of the run's row, and from now on use the database's clock if the request has none."""
        self.run_id, self.started_at = run_id, started_at
        if request.clock is None:
            self.clock = ServerClock(started_at)
