"""The loop: batch after batch in one transaction each, until nothing is left or the run must stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from peewee import DataError, IntegrityError, InternalError

from housekeeping.foundation.clock import RunBudget
from housekeeping.foundation.db import database, one_line
from housekeeping.foundation.leases import ExclusiveLease
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.reports import report
from housekeeping.sweeps import ledger
from housekeeping.sweeps.actions import Settled
from housekeeping.sweeps.batches import Batch, Position
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import Counts, Outcome

logger = named_logger(__name__)

#: What a single row can cause (a constraint, a trigger that raises, a value out of range). Anything
#: else (a lost connection, a lock or statement timeout, a missing right) concerns the whole run.
_ROW_ERRORS: Final = (IntegrityError, DataError, InternalError)

Verdict = tuple[Outcome, str | None]


@dataclass(frozen=True, slots=True)
class _Step:
    """Where the run stands once the transaction in hand commits."""

    counts: Counts
    position: Position | None
    verdict: Verdict | None = None


def initial_counts(sweep: Sweep) -> Counts:
    """All counts of the sweep at nothing, in the order they are shown."""
    return {**dict.fromkeys((*sweep.action.counted_as, "batches"), 0), "out_of_time": False}


@dataclass
class Walk:
    """One run's way through the stale rows.

    Attributes:
      now: The time staleness is measured against, read once.
      counts: What has been committed so far.
      position: The last row of the last committed batch; null: the front.
      lease: The lease to check before and within each batch, with its epoch.
      on_batch: Told the counts after each commit; for progress.
    """

    sweep: Sweep
    run_id: int
    now: datetime
    budget: RunBudget
    stopping: threading.Event
    position: Position | None = None
    lease: tuple[ExclusiveLease, int] | None = None
    on_batch: Callable[[Counts], None] | None = None
    counts: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.counts = initial_counts(self.sweep)

    def go(self) -> Verdict:
        """Walk until the end, the budget's, the process's or the lease's; the run's row is closed on return.

        Each batch commits or rolls back with its counts and cursor. The loop ends: every step
        moves the position on, or is the last one.

        Raises:
          LeaseLost, RunTakenOver: The batch in hand is rolled back, those before it stay.
          peewee.PeeweeException: The database failed the batch in hand; those before it stay.
        """
        while True:
            if self.lease is not None:
                self.lease[0].check()
            batch = Batch(self.sweep, self.now, self.position)
            try:
                with database.atomic():
                    settled = self.sweep.action.settle(batch)
                    step = self._write(settled, settled.picked)
            except _ROW_ERRORS as error:
                step = self._around_what_fails(batch, error)
            self.counts, self.position = step.counts, step.position
            if self.on_batch is not None:
                self.on_batch(self.counts)
            if step.verdict is not None:
                return step.verdict

    def _write(self, settled: Settled, picked: Sequence[Position]) -> _Step:
        """Count a batch, and close the run if it was the last, in the batch's transaction."""
        counts = self._added(settled)
        position = picked[-1] if picked else self.position
        verdict = self._verdict(len(picked))
        if verdict is None:
            ledger.advance(self.run_id, counts, as_cursor(position), self._fence())
        else:
            counts["out_of_time"] = verdict == ("partial", "out_of_time")
            ledger.finish(self.run_id, *verdict, counts=counts, cursor=as_cursor(position), lease=self._fence())
        return _Step(counts, position, verdict)

    def _verdict(self, picked: int) -> Verdict | None:
        if picked < self.sweep.batch_size:
            return "done", None
        if self.stopping.is_set():
            return "partial", "shutdown"
        if self.budget.exceeded():
            return "partial", "out_of_time"
        return None

    def _around_what_fails(self, batch: Batch, error: Exception) -> _Step:
        """Settle a batch in halves, until what fails is alone; that row costs itself only."""
        logger.warning("A batch failed and is taken apart", error=one_line(error))
        with database.atomic():
            positions = list(batch.rows().for_update(skip_locked=True).tuples())
        parts = [positions] if positions else []
        while parts:
            part = parts.pop()
            try:
                with database.atomic():
                    settled = self.sweep.action.settle(Batch(self.sweep, self.now, None, part))
                    counts = self._added(settled)
                    ledger.advance(self.run_id, counts, as_cursor(self.position), self._fence())
                self.counts = counts
            except _ROW_ERRORS as part_error:
                if len(part) == 1:
                    self._give_up(part[0], part_error)
                else:
                    middle = len(part) // 2
                    parts += [part[middle:], part[:middle]]
        with database.atomic():
            return self._write(Settled([], []), positions)

    def _give_up(self, position: Position, error: Exception) -> None:
        row = dict(zip((column.name for column in self.sweep.order), as_cursor(position) or [], strict=True))
        logger.error("A row could not be settled", row=row, error=one_line(error))
        report(error, worker=self.sweep.name, run_id=self.run_id, row=row)
        self.counts = {**self.counts, "failed": self.counts.get("failed", 0) + 1}

    def _added(self, settled: Settled) -> Counts:
        counts = dict(self.counts)
        for name, number in settled.counts.items():
            counts[name] += number
        counts["batches"] += bool(settled.changed)
        return counts

    def _fence(self) -> tuple[str, int] | None:
        return None if self.lease is None else (self.lease[0].key, self.lease[1])


def as_cursor(position: Position | None) -> list[Any] | None:
    """A position in a form JSON can hold and PostgreSQL reads back as it was."""
    if position is None:
        return None
    plain = (int, float, str, bool, type(None))
    return [
        value if isinstance(value, plain) else value.isoformat() if isinstance(value, datetime) else str(value)
        for value in position
    ]
