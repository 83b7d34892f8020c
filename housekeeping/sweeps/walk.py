"""The loop: batch after batch in one transaction each, until nothing is left or the run must stop."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from peewee import OperationalError

from housekeeping.foundation.clock import SYSTEM_CLOCK, Clock, RunBudget
from housekeeping.foundation.db import database, one_line, sqlstate
from housekeeping.foundation.leases import ExclusiveLease
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.reports import report
from housekeeping.foundation.spans import spanned
from housekeeping.sweeps import ledger
from housekeeping.sweeps.counting import added, flagged, initial_counts
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.gates import Gatekeeper
from housekeeping.sweeps.halves import ROW_ERRORS
from housekeeping.sweeps.ledger import Counts, Cursor, Outcome
from housekeeping.sweeps.pace import Pace
from housekeeping.sweeps.passes import (
    Divisible,
    Explainable,
    Failure,
    Pass,
    Position,
    Settled,
    Step,
    as_cursor,
)
from housekeeping.sweeps.switches import Switched
from housekeeping.sweeps.vitals import Vitals, table_name

logger = named_logger(__name__)

#: Class of PostgreSQL's codes for a transaction that can write nothing: it has come to a read-only server, after a
#: failover perhaps. The driver takes that for an internal error.
_NO_WRITING: Final = "25"
#: PostgreSQL's own word that the same transaction may well succeed: serialization failure, deadlock.
_TRY_AGAIN: Final = ("40001", "40P01")
_TRIES: Final = 4
Verdict = tuple[Outcome, str | None]
_PAUSED: Final[Verdict] = ("partial", "paused")


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
      switch: What operators said of the worker when the run began; each batch hears it anew.
      heeds_pause: False for a run that was forced.
      clock, vitals: What batches are measured by, and where the signs of the gates come from.
      counts: What has been committed so far.
      passes: What it walks through.
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
    switch: Switched | None = None
    heeds_pause: bool = True
    clock: Clock = SYSTEM_CLOCK
    vitals: Vitals | None = None
    counts: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.counts = initial_counts(self.sweep)
        self.passes = self.sweep.walks()
        self._beat_at = time.monotonic()
        target, heeds_pause = self.sweep.target_batch, self.heeds_pause
        self._pace = Pace(self.passes, target, self.budget, self.clock, heeds_pause=heeds_pause)
        self._pace.heed(self.switch)
        readings = [each.readings(self.now) for each in self.passes if isinstance(each, Explainable)]
        tables = sorted({table_name(reading.model) for some in readings for reading in some})
        self._gates = Gatekeeper(self.sweep.gates, tables, self.budget, self.stopping.wait, self.vitals)

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
            held = self._held()
            if held is not None:
                return self._ended_between(state, held)
            if self._gates.is_shut:
                self._pace.ease(state.place)
            walk = self._pace.sized(state.place, self.passes[state.place])
            with self._pace.measured(state.place, walk, self._gates.took if self._gates.measures else None):
                state = self._batch(walk, state)
        return state.verdict

    def _batch(self, walk: Pass, state: _State) -> _State:
        step = Step(
            self.sweep.name, self.run_id, self.now, state.after, self.argument, self._time_is_up, check=self._check
        )
        taken = walk.take(step)
        try:
            settled, state = self._settled(walk, step, taken, state)
        except ROW_ERRORS as error:
            if not isinstance(walk, Divisible) or (sqlstate(error) or "").startswith(_NO_WRITING):
                raise
            return self._around_what_fails(walk, step, taken, state, error)
        self._committed(walk, step, settled, state)
        if state.verdict is not None and self._fails(state.verdict, settled):
            assert settled.unreachable is not None
            raise settled.unreachable
        return state

    def _held(self) -> Verdict | None:
        """Wait for the gates before a batch; how the run ends here, None to go on."""
        if self._gates.hold(self._time_is_up) is None:
            return None
        if self.stopping.is_set():
            return "partial", "shutdown"
        return _PAUSED if self._pace.paused else ("partial", "gate")

    def _ended_between(self, state: _State, verdict: Verdict) -> Verdict:
        """Close the row outside of a batch, with the place of the last one."""
        counts = flagged(state.counts, verdict)
        with database.atomic():
            ledger.finish(self.run_id, *verdict, counts=counts, cursor=self._as_cursor(state), lease=self._fence())
        self.counts = counts
        return verdict

    @spanned("housekeeping.batch")
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
        counts = added(before.counts, settled)
        state = _State(counts, before.place, settled.position)
        if settled.exhausted and before.place + 1 < len(self.passes):
            state = _State(counts, before.place + 1, None)
        verdict = self._verdict(before, settled)
        cursor = self._as_cursor(state)
        if verdict is None:
            self._pace.heed(ledger.advance(self.run_id, counts, cursor, self._fence()))
            if not self._pace.paused:
                return state
            verdict = _PAUSED
        counts = flagged(counts, verdict)
        state = replace(state, counts=counts)
        if self._fails(verdict, settled):
            # The row stays open for the error, which closes it as failed.
            ledger.advance(self.run_id, counts, cursor, self._fence())
            return replace(state, verdict=verdict)
        ledger.finish(self.run_id, *verdict, counts=counts, cursor=cursor, lease=self._fence())
        return replace(state, verdict=verdict)

    def _verdict(self, before: _State, settled: Settled) -> Verdict | None:
        if settled.stop is not None:
            return "partial", settled.stop
        if settled.exhausted and before.place + 1 == len(self.passes):
            return "done", None
        if self.stopping.is_set():
            return "partial", "shutdown"
        if self.budget.exceeded():
            return "partial", "out_of_time"
        return None

    def _fails(self, verdict: Verdict, settled: Settled) -> bool:
        # To be stopped is not to fail: the next run meets what is unreachable.
        return settled.unreachable is not None and verdict not in (("partial", "shutdown"), _PAUSED)

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
            except ROW_ERRORS as part_error:
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
        except ROW_ERRORS as again:
            given_up = Settled(failures=[Failure(record, again)])
            return self._part(walk, step, state, lambda: given_up)

    def _part(self, walk: Pass, step: Step, state: _State, settle: Callable[[], Settled]) -> _State:
        """Settle part of a batch in a transaction of its own; the position stays before the batch."""
        with database.atomic():
            settled = settle()
            counts = added(state.counts, settled)
            ledger.advance(self.run_id, counts, self._as_cursor(state), self._fence())
        state = replace(state, counts=counts)
        self._committed(walk, step, settled, state)
        return state

    def _time_is_up(self) -> bool:
        """Asked between outside effects, which may take long: also the moment to give a sign of life."""
        if self.lease is not None:
            self.lease[0].check()
        if time.monotonic() - self._beat_at > ledger.HEARTBEAT.total_seconds():
            with database.atomic():
                self._pace.heed(ledger.beat(self.run_id))
            self._beat_at = time.monotonic()
        return self.stopping.is_set() or self._pace.paused or self.budget.exceeded()

    def _check(self) -> None:
        """Ask the ledger, whatever our own clock says: it stands still while a machine is paused."""
        if self.lease is not None:
            self.lease[0].check()
        ledger.check(self.run_id)

    def _fence(self) -> tuple[str, int] | None:
        return None if self.lease is None else (self.lease[0].key, self.lease[1])

    def _as_cursor(self, state: _State) -> Cursor | None:
        if state.after is None and state.place == 0:
            return None
        return {"pass": self.passes[state.place].name, "after": as_cursor(state.after)}

    def _from_cursor(self) -> _State:
        names = [each.name for each in self.passes]
        # A cursor of an older release may name a pass there is no more: then from the front.
        if self.cursor is None or self.cursor["pass"] not in names:
            return _State(self.counts)
        after = self.cursor["after"]
        return _State(self.counts, names.index(self.cursor["pass"]), None if after is None else tuple(after))
