"""Stage that drops partitions, one in each batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from peewee import Model, PeeweeException

from housekeeping.sweeps.partitions.action import FREED, SKIPPED, DropPartitions
from housekeeping.sweeps.partitions.candidate import Candidate
from housekeeping.sweeps.partitions.candidates import Candidates
from housekeeping.sweeps.partitions.must_stay import Keeping, fails
from housekeeping.sweeps.partitions.outcome import Outcome
from housekeeping.sweeps.partitions.removal import detach_first, outcome_of, remove
from housekeeping.sweeps.stages.stage import Backlog, Batch, BatchResult, StagePlan

#: How often a pause between two attempts looks whether the run has to end.
_LOOK_S: Final = 0.2


@dataclass(slots=True)
class _Prepared:
    """A partition before the transaction of its batch.

    Attributes:
      candidate: None if nothing is left, or if the run has to end first.
      ended: Its outcome, if known already; None if the transaction decides.
    """

    candidate: Candidate | None = None
    ended: Outcome | None = None


class PartitionStage:
    """Stage that drops or detaches the partitions whose range is over; created for each run.

    Parameters:
      worker: The sweep's name. Only this worker finishes what its interrupted runs have left.
      model: The partitioned table.
      column: The first column of the sweep's `order`, by which the table is partitioned.
      stale: The sweep's predicate; None if the age of the range decides alone.
      hold: Returns the condition of the rows on hold, which keep their partition; None if the sweep has no holds.
    """

    batch_size: Final = 1

    def __init__(
        self,
        name: str,
        worker: str,
        model: type[Model],
        column: Any,
        action: DropPartitions,
        stale: Callable[[datetime], Any] | None = None,
        hold: Callable[[], Any] | None = None,
    ) -> None:
        self.name = name
        self.worker = worker
        self.model = model
        self.column = column
        self.action = action
        self.stale = stale
        self.hold = hold
        self._candidates: Candidates | None = None
        self._queue: deque[Candidate] = deque()

    def resized(self, batch_size: int) -> PartitionStage:
        """Return this stage: a batch is always one partition."""
        return self

    def keeping(self, now: datetime) -> list[Keeping]:
        """Return the conditions of rows that keep their partition."""
        found = []
        if self.stale is not None:
            found.append(Keeping(fails(self.stale(now), self.column.column_name), "a row does not match `stale`"))
        if self.hold is not None:
            found.append(Keeping(self.hold(), "a row is on hold"))
        return found

    def conditions(self, now: datetime) -> list[Any]:
        """Return the partition key and the conditions on rows, without a query."""
        rows = [] if self.stale is None else [self.stale(now)]
        return [self.column, *rows, *([] if self.hold is None else [self.hold()])]

    def prepare(self, batch: Batch) -> _Prepared:
        """Choose the next partition, and detach it if PostgreSQL can do that concurrently."""
        if self._candidates is None:
            self._candidates = self.candidates(batch.now)
            self._queue = deque(self._candidates.all())
            self._candidates.release_others()
        if not self._queue or not self._pause(self._queue[0], batch):
            return _Prepared()
        candidate = self._queue.popleft()
        try:
            reason = self._candidates.reason_to_stay(candidate) if candidate.needs_checks else None
            if reason is not None:
                return _Prepared(candidate, Outcome("stays", reason))
            batch.time_is_up()  # sends a heartbeat if the check took long
            if self._detaches_before(candidate):
                detach_first(self._candidates, candidate, batch.check)
        except PeeweeException as error:
            return _Prepared(candidate, outcome_of(error, candidate))
        return _Prepared(candidate)

    def apply(self, batch: Batch, prepared: _Prepared) -> BatchResult:
        """Drop or release the partition in the batch's transaction, after its rows were checked once more."""
        candidate = prepared.candidate
        if candidate is None:
            return BatchResult(exhausted=not self._queue)
        assert self._candidates is not None
        outcome = prepared.ended or remove(self._candidates, candidate)
        if outcome.what == "busy" and candidate.attempts >= self.action.lock_retries:
            outcome = Outcome("stays", f"it was locked in {candidate.attempts + 1} attempts: {outcome.reason}")
        exhausted = not self._queue and outcome.what != "busy"
        row = {"candidate": candidate, "outcome": outcome}
        return BatchResult(outcome.counts, exhausted=exhausted, rows=[row])

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        """Log what became of the partition. One that was locked is tried again."""
        for row in result.rows:
            candidate, outcome = row["candidate"], row["outcome"]
            outcome.log(candidate)
            if outcome.what == "busy":
                candidate.attempts += 1
                self._queue.appendleft(candidate)
            elif outcome.what == "stays":
                assert self._candidates is not None
                candidate.release(self.worker, self._candidates.table)

    def candidates(self, now: datetime) -> Candidates:
        """Return the partitions whose range is over, as the catalog has them now.

        Raises:
          DeclarationError: The table is not partitioned by the sweep's column.
        """
        return Candidates.read(self.worker, self.model, self.column, self.action, now, self.keeping(now))

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        """Return the number of partitions that the next run would drop.

        Note: Includes those that cannot be checked within a second.
        """
        number = len(self._due(now))
        return Backlog(min(number, limit), number <= limit)

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        """Return the beginning of the oldest partition of the backlog, or its end if it has no beginning."""
        return min((each.begins for each in self._due(now) if each.begins is not None), default=None)

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        """Return the partitions whose range is over, with the reason why one stays."""
        candidates = self.candidates(now)
        found = [(each, candidates.reason_to_stay(each)) for each in candidates.all()]
        leaving = [each for each, reason in found if reason is None]
        counts = {self.action.counted_as[0]: len(leaving), SKIPPED: len(found) - len(leaving)}
        if not self.action.keep_table:
            counts[FREED] = sum(each.partition.bytes for each in leaving)
        begins = sorted(each.begins for each in leaving if each.begins is not None)
        return StagePlan(
            self.name,
            Backlog(len(leaving)),
            counts,
            next(iter(begins), None),
            begins[-1] if begins else None,
            [each.described(reason) for each, reason in found],
            title="partitions whose range is over",
        )

    def _due(self, now: datetime) -> list[Candidate]:
        candidates = self.candidates(now)
        return [each for each in candidates.all() if candidates.is_due(each)]

    def _pause(self, candidate: Candidate, batch: Batch) -> bool:
        """Wait before another attempt; return whether the run continues."""
        ends_at = time.monotonic() + candidate.pause_s
        while time.monotonic() < ends_at:
            if batch.time_is_up():
                return False
            time.sleep(_LOOK_S)
        return True

    def _detaches_before(self, candidate: Candidate) -> bool:
        """Return whether the partition is detached before the transaction that drops it."""
        assert self._candidates is not None
        concurrently = candidate.partition.pending or self._candidates.table.detaches_concurrently
        return concurrently and not candidate.is_detached
