"""The loop: batch after batch in one transaction each, until nothing is left or the run must stop."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from peewee import DataError, IntegrityError, InternalError, OperationalError

from housekeeping.foundation.clock import RunBudget
from housekeeping.foundation.db import database, one_line, sqlstate
from housekeeping.foundation.leases import ExclusiveLease
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.reports import report
from housekeeping.sweeps import ledger
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import Counts, Cursor, Outcome
from housekeeping.sweeps.passes import Divisible, Failure, Pass, Position, Settled, Step, as_cursor

logger = named_logger(__name__)

#: What a single row can cause (a constraint, a trigger that raises, a value out of range). Anything
#: else (a lost connection, a lock or statement timeout, a missing right) concerns the whole run.
_ROW_ERRORS: Final = (IntegrityError, DataError, InternalError)
#: Class of PostgreSQL's codes for a transaction that can write nothing: it has come to a read-only server, after a
#: failover perhaps. The driver takes that for an internal error.
_NO_WRITING: Final = "25"
#: PostgreSQL's own word that the same transaction may well succeed: serialization failure, deadlock.
_TRY_AGAIN: Final = ("40001", "40P01")
_TRIES: Final = 4
#: Counts that say that time ran out, by whichever name the worker's document gives it.
_TIME_FLAGS: Final = ("out_of_time", "execution_timeout")

Verdict = tuple[Outcome, str | None]


def initial_counts(sweep: Sweep) -> Counts:
    """All counts of the sweep at nothing, in the order they are shown."""
    return {name: False if name in _TIME_FLAGS else 0 for name in sweep.counts}


def in_order(sweep: Sweep, counts: Counts) -> Counts:
    """Counts as the ledger has them (jsonb keeps no order), in the order the worker's own are shown."""
    names = dict.fromkeys((*sweep.counts, *counts))
    return {name: counts[name] for name in names if name in counts}


@dataclass(frozen=True, slots=True)
class _State:
    """Where a run stands: what it has counted, and the place it goes on from."""

    counts: Counts
    place: int = 0  # the number of the pass
    after: Position | None = None
    verdict: Verdict | None = None


@dataclass
class Walk:
    """One run's way through what is stale.

    Attributes:
      now: The time staleness is measured against, read once.
      cursor: Where an earlier run stopped, as its row in the ledger has it; null: the front.
      lease: The lease to check before and within each batch, with its epoch.
      on_batch: Told the counts after each commit; for progress.
      counts: What has been committed so far.
    """

    sweep: Sweep
    run_id: int
    now: datetime
    budget: RunBudget
    stopping: threading.Event
    cursor: Cursor | None = None
    argument: Any = None
    lease: tuple[ExclusiveLease, int] | None = None
    on_batch: Callable[[Counts], None] | None = None
    counts: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.counts = initial_counts(self.sweep)
        self._passes = self.sweep.walks()
        self._beat_at = time.monotonic()

    def go(self) -> Verdict:
        """Walk until the end, the budget's, the process's or the lease's; the run's row is closed on return.

        Each batch commits or rolls back with its counts and cursor. The loop ends: every step
        moves the position on, or is the last one of its pass.

        Raises:
          LeaseLost, RunTakenOver: The batch in hand is rolled back, those before it stay.
          peewee.PeeweeException: The database failed the batch in hand; those before it stay.
          BaseException: What a pass says was unreachable, once the rest is settled; all batches stay.
        """
        state = self._from_cursor()
        while state.verdict is None:
            if self.lease is not None:
                self.lease[0].check()
            walk = self._passes[state.place]
            step = Step(self.sweep.name, self.run_id, self.now, state.after, self.argument, time_is_up=self._time_is_up)
            taken = walk.take(step)
            try:
                settled, state = self._settled(walk, step, taken, state)
            except _ROW_ERRORS as error:
                if not isinstance(walk, Divisible) or (sqlstate(error) or "").startswith(_NO_WRITING):
                    raise
                state = self._around_what_fails(walk, step, taken, state, error)
            else:
                self._committed(walk, step, settled, state)
                if state.verdict is not None and self._fails(state.verdict, settled):
                    assert settled.unreachable is not None
                    raise settled.unreachable
        return state.verdict

    def _settled(self, walk: Pass, step: Step, taken: Any, state: _State) -> tuple[Settled, _State]:
        """A batch and its counts in one transaction; begun again when PostgreSQL chose it as a deadlock's victim."""
        for tries_left in reversed(range(_TRIES)):
            try:
                with database.atomic():
                    settled = walk.settle(step, taken)
                    return settled, self._written(state, settled)
            except OperationalError as error:
                if sqlstate(error) not in _TRY_AGAIN or not tries_left:
                    raise
                logger.warning("A batch is tried again", error=one_line(error))
        raise AssertionError("the last try returns or raises")

    def _written(self, before: _State, settled: Settled) -> _State:
        """Count a batch, and close the run if it was the last, in the batch's transaction."""
        counts = self._added(before.counts, settled)
        state = _State(counts, before.place, settled.position)
        if settled.exhausted and before.place + 1 < len(self._passes):
            state = _State(counts, before.place + 1, None)
        verdict = self._verdict(before, settled)
        cursor = self._as_cursor(state)
        if verdict is None:
            ledger.advance(self.run_id, counts, cursor, self._fence())
            return state
        for flag in set(_TIME_FLAGS) & set(counts):
            counts[flag] = verdict == ("partial", "out_of_time")
        if self._fails(verdict, settled):
            # The row stays open for the error, which closes it as failed.
            ledger.advance(self.run_id, counts, cursor, self._fence())
            return replace(state, verdict=verdict)
        ledger.finish(self.run_id, *verdict, counts=counts, cursor=cursor, lease=self._fence())
        return replace(state, verdict=verdict)

    def _verdict(self, before: _State, settled: Settled) -> Verdict | None:
        if settled.stop is not None:
            return "partial", settled.stop
        if settled.exhausted and before.place + 1 == len(self._passes):
            return "done", None
        if self.stopping.is_set():
            return "partial", "shutdown"
        if self.budget.exceeded():
            return "partial", "out_of_time"
        return None

    def _fails(self, verdict: Verdict, settled: Settled) -> bool:
        # A shutdown is not a failure: the message goes back and the next run meets what is unreachable.
        return settled.unreachable is not None and verdict != ("partial", "shutdown")

    def _committed(self, walk: Pass, step: Step, settled: Settled, state: _State) -> None:
        self.counts = state.counts
        for failure in settled.failures:
            logger.error("A record could not be settled", record=failure.record, error=one_line(failure.error))
        for failure in (*settled.failures, *settled.rescued):
            report(failure.error, worker=self.sweep.name, run_id=self.run_id, **failure.record)
        walk.committed(step, settled)
        if self.on_batch is not None:
            self.on_batch(self.counts)

    def _around_what_fails(self, walk: Pass, step: Step, taken: Any, state: _State, error: Exception) -> _State:
        """Settle a batch in halves, until what fails is alone; that record costs itself only."""
        assert isinstance(walk, Divisible)
        logger.warning("A batch failed and is taken apart", error=one_line(error))
        with database.atomic():
            positions = walk.positions(step)
        parts = [positions] if positions else []
        while parts:
            part = parts.pop()
            some = replace(step, only=part)
            try:
                state = self._part(walk, some, state, functools.partial(walk.settle, some, taken))
            except _ROW_ERRORS as part_error:
                if len(part) > 1:
                    middle = len(part) // 2
                    parts += [part[middle:], part[:middle]]
                else:
                    state = self._single(walk, some, state, part_error)
        rest = Settled({}, positions[-1] if positions else step.after, len(positions) < walk.batch_size)
        with database.atomic():
            state = self._written(state, rest)
        self._committed(walk, step, rest, state)
        return state

    def _single(self, walk: Pass, step: Step, state: _State, error: Exception) -> _State:
        """The record that failed is settled another way, or given up and counted."""
        assert isinstance(walk, Divisible) and step.only is not None
        record, rescue = walk.describe(step.only[0]), walk.rescue
        try:
            return self._part(
                walk, step, state, lambda: rescue(step, error) or Settled(failures=[Failure(record, error)])
            )
        except _ROW_ERRORS as again:
            given_up = Settled(failures=[Failure(record, again)])
            return self._part(walk, step, state, lambda: given_up)

    def _part(self, walk: Pass, step: Step, state: _State, settle: Callable[[], Settled]) -> _State:
        """Settle part of a batch in a transaction of its own; the position stays before the batch."""
        with database.atomic():
            settled = settle()
            counts = self._added(state.counts, settled)
            ledger.advance(self.run_id, counts, self._as_cursor(state), self._fence())
        state = replace(state, counts=counts)
        self._committed(walk, step, settled, state)
        return state

    def _added(self, before: Counts, settled: Settled) -> Counts:
        counts = dict(before)
        for name, value in settled.counts.items():
            counts[name] = counts[name] + value if isinstance(value, int) and not isinstance(value, bool) else value
        if "batches" in counts:
            counts["batches"] += bool(settled.rows)
        if settled.failures:
            counts["failed"] = counts.get("failed", 0) + len(settled.failures)
        return counts

    def _time_is_up(self) -> bool:
        """Asked between outside effects, which may take long: also the moment to give a sign of life."""
        if self.lease is not None:
            self.lease[0].check()
        if time.monotonic() - self._beat_at > ledger.HEARTBEAT.total_seconds():
            with database.atomic():
                ledger.beat(self.run_id)
            self._beat_at = time.monotonic()
        return self.stopping.is_set() or self.budget.exceeded()

    def _fence(self) -> tuple[str, int] | None:
        return None if self.lease is None else (self.lease[0].key, self.lease[1])

    def _as_cursor(self, state: _State) -> Cursor | None:
        if state.after is None and state.place == 0:
            return None
        return {"pass": self._passes[state.place].name, "after": as_cursor(state.after)}

    def _from_cursor(self) -> _State:
        names = [each.name for each in self._passes]
        # A cursor of an older release may name a pass there is no more: then from the front.
        if self.cursor is None or self.cursor["pass"] not in names:
            return _State(self.counts)
        after = self.cursor["after"]
        return _State(self.counts, names.index(self.cursor["pass"]), None if after is None else tuple(after))
