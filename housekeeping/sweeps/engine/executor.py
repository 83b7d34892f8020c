"""The loop: batch after batch in one transaction each, until nothing is left or the run must stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from peewee import OperationalError, PeeweeException

from housekeeping.core.clock import SYSTEM_CLOCK, Clock, RunBudget
from housekeeping.core.errors import HousekeepingError, SameErrorRepeated
from housekeeping.core.sanitize import error_line, shortened
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.telemetry.tracing import traced
from housekeeping.database.connection import database, sqlstate
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.sweeps.checks.unique_keys import stages_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.announcing import Announcer
from housekeeping.sweeps.engine.batch_sizing import BatchSizer
from housekeeping.sweeps.engine.counts import added, flagged, initial_counts
from housekeeping.sweeps.engine.rejections import Rejections
from housekeeping.sweeps.ledger import runs
from housekeeping.sweeps.ledger.overrides import Override
from housekeeping.sweeps.ledger.runs import Counts, Cursor, Outcome
from housekeeping.sweeps.limits.breaker import RowLimit
from housekeeping.sweeps.limits.db_health import HealthSource, table_name
from housekeeping.sweeps.limits.throttle import Throttle
from housekeeping.sweeps.stages.bisection import (
    MOST_FAILURES,
    Bisection,
    FailureStreak,
    is_row_error,
    is_timeout,
    shorten_timeouts,
)
from housekeeping.sweeps.stages.stage import (
    Batch,
    BatchResult,
    Divisible,
    Explainable,
    Failure,
    Position,
    PreflightResult,
    Stage,
    as_cursor,
)
from housekeeping.sweeps.stages.table_stage import TableStage

logger = named_logger(__name__)

#: PostgreSQL's own word that the same transaction may well succeed: serialization failure, deadlock.
_TRY_AGAIN: Final = ("40001", "40P01")
_TRIES: Final = 4
_LONGEST_ERROR: Final = 300  # characters of an error in a log line
_LOCK_TIMEOUT: Final = "55P03"
Verdict = tuple[Outcome, str | None]
_PAUSED: Final[Verdict] = ("partial", "paused")
#: Ends of a run that was told to stop; it does not fail, because the next one meets the same error.
_STOPPED: Final[tuple[Verdict, ...]] = (("partial", "shutdown"), _PAUSED)


@dataclass(frozen=True, slots=True)
class _State:
    """Where a run stands.

    Attributes:
      counts: What it has counted.
      place: The number of the stage.
      after: The position in that stage; None: its front.
      until: Where a resumed run ends, having come to the end and started again at the front: stage and position.
      verdict: How it ends; None while it continues.
    """

    counts: Counts
    place: int = 0
    after: Position | None = None
    until: tuple[int, Position | None] | None = None
    verdict: Verdict | None = None


@dataclass
class Executor:
    """One run's way through what is stale.

    Attributes:
      now: The time staleness is measured against, read once.
      cursor: Where an earlier run stopped, as its row in the ledger has it; null: the front.
      lease: The lease to check before and within each batch, with its epoch.
      on_batch: Told the counts after each commit; for progress.
      switch: What operators said of the worker when the run began; each batch hears it anew.
      heeds_pause: False for a run that was forced.
      clock, health: What batches are measured by, and where the signs of the gates come from.
      preflight: What the run did before its lease, with an error to fail with at the end.
      counts: What has been committed so far.
      passes: What it walks through.
      rejections: The records it could not settle.
      reached: Where the last committed batch ended.
      row_limit: The breaker's limit of this run.
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
    switch: Override | None = None
    heeds_pause: bool = True
    clock: Clock = SYSTEM_CLOCK
    health: HealthSource | None = None
    preflight: PreflightResult = field(default_factory=PreflightResult)
    counts: Counts = field(init=False)
    row_limit: RowLimit = field(init=False, default_factory=RowLimit)

    def __post_init__(self) -> None:
        self.counts = initial_counts(self.sweep)
        self.rejections = Rejections(self.sweep.name, self.run_id, self.argument)
        self.reached: Position | None = None
        self.stages = stages_of(self.sweep)
        self._announcer = Announcer(self.sweep.name, self.run_id)
        self._beat_at = time.monotonic()
        target, heeds_pause = self.sweep.target_batch, self.heeds_pause
        self._sizer = BatchSizer(self.stages, target, self.budget, self.clock, heeds_pause=heeds_pause)
        self._sizer.heed(self.switch)
        explain_queries = [each.explain_queries(self.now) for each in self.stages if isinstance(each, Explainable)]
        tables = sorted({table_name(reading.model) for some in explain_queries for reading in some})
        self._streak = FailureStreak()
        self._hopeless: str | None = None
        self._left: tuple[_State, SameErrorRepeated] | None = None
        self._gates = Throttle(self.sweep.throttle, tables, self.budget, self.stopping.wait, self.health)

    def go(self) -> Verdict:
        """Executor until the end, the budget's, the process's or the lease's; the run's row is closed on return.

        Each batch commits or rolls back with its counts and cursor. The loop ends: every step
        moves the position on, or is the last one of its pass.

        Raises:
          LeaseLost, RunTakenOver: The batch in hand is rolled back, those before it stay.
          peewee.PeeweeException: The database failed the batch in hand; those before it stay.
          BaseException: What a pass says was unreachable, once the rest is settled; all batches stay.
        """
        self._began = state = self._from_cursor()
        begun = False
        while state.verdict is None:
            if self.lease is not None:
                self.lease[0].check()
            held = self._held(begun)
            if held is not None:
                return self._ended_between(state, held)
            begun = True
            if self._gates.is_active:
                self._sizer.ease(state.place)
            walk = self._sizer.sized(state.place, self.stages[state.place], self.row_limit.left(state.counts))
            try:
                with self._sizer.measured(state.place, walk, self._gates.took if self._gates.measures else None):
                    state = self._batch(walk, state)
            except OperationalError as error:
                # A throttled run that a queue of locks keeps waiting does not fail: the next one goes on.
                if not self._gates.is_active or sqlstate(error) != _LOCK_TIMEOUT:
                    raise
                # Parts of the batch may have been committed, and their rows are counted.
                return self._ended_between(replace(state, counts=self.counts), ("partial", "gate"))
        return state.verdict

    def _batch(self, walk: Stage, state: _State) -> _State:
        batch = Batch(
            self.sweep.name,
            self.run_id,
            self.now,
            state.after,
            self._ends_at(state),
            self.argument,
            self._time_is_up,
            check=self._check,
            most=self.row_limit.left(state.counts),
        )
        prepared = walk.prepare(batch)
        try:
            settled, state = self._settled(lambda: walk.apply(batch, prepared), state, self._written)
        except (PeeweeException, HousekeepingError) as error:
            if not isinstance(walk, Divisible) or not is_row_error(error):
                raise
            return self._bisected(walk, batch, prepared, state, error)
        self._committed(walk, batch, settled, state)
        return self._after(settled, state)

    def _after(self, settled: BatchResult, state: _State) -> _State:
        """Return the state after a batch; leave its stage where the same error keeps every row from changing.

        Raises:
          BaseException: What the run could not do, when this was its last batch.
        """
        if state.verdict is None and self._hopeless is not None and not settled.exhausted:
            return self._leave_stage(state)
        self._hopeless = None
        if state.verdict is not None and (error := self._failure(state.verdict, settled)) is not None:
            raise error
        return state

    def _leave_stage(self, state: _State) -> _State:
        """Continue with the next stage; the run ends as failed, and the next one continues behind these rows."""
        if self._left is None:
            words = f"{MOST_FAILURES} rows in a row failed with the same error: {self._hopeless}"
            self._left = state, SameErrorRepeated(words)
        self._hopeless = None
        self._streak.succeeded()
        settled, state = self._settled(lambda: BatchResult(position=state.after), state, self._written)
        return self._after(settled, state)

    def _ends_at(self, state: _State) -> Position | None:
        """Return where the stage ends for a resumed run on its second way; None: at its end."""
        return state.until[1] if state.until is not None and state.until[0] == state.place else None

    def _held(self, begun: bool) -> Verdict | None:
        """Wait for the gates before a batch; how the run ends here, None to go on.

        A run always takes its first batch: no throttle may keep the work from moving at all.
        """
        if self._gates.hold(self._time_is_up) is None:
            return None
        if self.stopping.is_set():
            return "partial", "shutdown"
        if self._sizer.paused:
            return _PAUSED
        return ("partial", "gate") if begun else None

    def _ended_between(self, state: _State, verdict: Verdict) -> Verdict:
        """Close the row outside of a batch, with the place of the last one.

        Raises:
          Exception: The preflight's, unless the run was stopped; the row stays open for it.
        """
        counts, cursor = flagged(state.counts, verdict, self.budget.exceeded), self._as_cursor(state)
        if verdict[1] == "gate":
            counts |= self._gates.as_count()
        error = None if verdict in _STOPPED else self.preflight.error
        with database.atomic():
            if error is None:
                runs.finish(self.run_id, *verdict, counts=counts, cursor=cursor, lease=self._fence())
            else:
                runs.advance(self.run_id, counts, cursor, self._fence())
        self.counts = counts
        if error is not None:
            raise error
        return verdict

    @traced("housekeeping.batch")
    def _settled(
        self, settle: Callable[[], BatchResult], state: _State, write: Callable[[_State, BatchResult], _State]
    ) -> tuple[BatchResult, _State]:
        """Commit what `settle` does together with its counts; try again when PostgreSQL broke a deadlock by it."""
        for tries_left in reversed(range(_TRIES)):
            try:
                with database.atomic():
                    settled = settle()
                    self._announcer.announce(self.stages[state.place], settled)
                    return settled, write(state, settled)
            except OperationalError as error:
                if sqlstate(error) not in _TRY_AGAIN or not tries_left:
                    raise
                logger.warning("A batch is tried again", error=shortened(error_line(error), _LONGEST_ERROR))
        raise AssertionError("the last try returns or raises")

    def _written(self, before: _State, settled: BatchResult) -> _State:
        """Count a batch, and close the run if it was the last, in the batch's transaction."""
        state = replace(self._following(before, settled), counts=added(before.counts, settled))
        verdict = self._verdict(state, settled)
        cursor = self._as_cursor(state)
        if verdict is None:
            self._sizer.heed(runs.advance(self.run_id, state.counts, cursor, self._fence()))
            if not self._sizer.paused:
                return state
            verdict = _PAUSED
        counts = self.row_limit.noted(flagged(state.counts, verdict, self.budget.exceeded), verdict[1])
        state = replace(state, counts=counts, verdict=verdict)
        if self._failure(verdict, settled) is not None:
            # The row stays open for the error, which closes it as failed.
            runs.advance(self.run_id, counts, self._as_cursor(self._left[0] if self._left else state), self._fence())
        else:
            runs.finish(self.run_id, *verdict, counts=counts, cursor=cursor, lease=self._fence())
        return state

    def _following(self, before: _State, settled: BatchResult) -> _State:
        """Return where the run goes on after a batch; its verdict is ``done`` where nothing is left.

        A resumed run that comes to the end starts again at the front, and ends where it began.
        """
        if not settled.exhausted:
            return replace(before, after=settled.position)
        until = before.until
        last = len(self.stages) - 1 if until is None else until[0] - (until[1] is None)
        if before.place < last:
            return replace(before, place=before.place + 1, after=None)
        began = self._began
        resumed = (began.place, began.after) != (0, None)
        if resumed and until is None and self._left is None and self._goes_to_the_front():
            return replace(before, place=0, after=None, until=(began.place, began.after))
        return replace(before, after=settled.position, verdict=("done", None))

    def saw_everything(self) -> bool:
        """Return whether a run that is done has seen all records: from the front, or all around, and alone."""
        resumed = (self._began.place, self._began.after) != (0, None)
        return self.sweep.shards == 1 and (not resumed or self._goes_to_the_front())

    def _goes_to_the_front(self) -> bool:
        """Return whether all stages know where to end on a second way; others take care of that themselves."""
        return all(isinstance(each, TableStage) for each in self.stages)

    def _verdict(self, state: _State, settled: BatchResult) -> Verdict | None:
        if settled.stop is not None:
            return "partial", settled.stop
        if state.verdict is not None:
            return state.verdict
        if (reached := self.row_limit.reached(state.counts)) is not None:
            return reached
        if self.stopping.is_set():
            return "partial", "shutdown"
        if self.budget.exceeded():
            return "partial", "out_of_time"
        return None

    def _failure(self, verdict: Verdict, settled: BatchResult) -> BaseException | None:
        """Return the error that a run with this verdict ends with instead; None for a run that was stopped."""
        if verdict in _STOPPED:
            return None  # the next run meets what is unreachable
        return settled.unreachable or (self._left[1] if self._left else None) or self.preflight.error

    def _committed(self, walk: Stage, batch: Batch, settled: BatchResult, state: _State) -> None:
        self.counts = state.counts
        self.reached = state.after
        self.rejections.add(settled)
        walk.after_commit(batch, settled)
        self._announcer.after_commit()
        if self.on_batch is not None:
            self.on_batch(self.counts)
        if isinstance(walk, TableStage):
            self._note_failures(settled)

    def _note_failures(self, settled: BatchResult) -> None:
        if any(settled.counts.values()):
            self._streak.succeeded()
            return
        for failure in settled.failures:
            if self._streak.failed(failure):
                self._hopeless = error_line(failure.error)

    def _bisected(self, walk: Divisible, batch: Batch, prepared: Any, state: _State, error: Exception) -> _State:
        """Process a batch that failed in parts, until each row that fails is alone; such a row costs only itself."""
        logger.warning("A batch failed and is bisected", error=shortened(error_line(error), _LONGEST_ERROR))
        with database.atomic():
            positions = walk.positions(batch, prepared)
        bisection = Bisection(positions, error)
        end = walk.after_all(batch, prepared, positions)
        try:
            while (part := bisection.next()) is not None:
                if self._must_stop() or bisection.took_too_long():
                    return self._ended_within(state)
                state = self._part(walk, replace(batch, only=part), prepared, state, bisection)
                if self._hopeless is not None:
                    break
        except PeeweeException as again:
            if is_timeout(again):
                self._pass_by(end, state)  # the next run must not begin with a batch that cannot be processed
            raise
        if self._hopeless is not None and part is not None and not bisection.timed_out:
            end = BatchResult(position=part[-1], exhausted=False)  # those behind it were not tried
        if bisection.timed_out:
            self._sizer.shrink(state.place, bisection.part_size)
        settled, state = self._settled(lambda: end, state, self._written)
        self._committed(walk, batch, settled, state)
        return self._after(settled, state)

    def _part(
        self, walk: Divisible, batch: Batch, prepared: Any, state: _State, bisection: Bisection[Position]
    ) -> _State:
        """Process a part of a batch in a transaction of its own; the position stays before the batch."""
        assert batch.only is not None

        def settle() -> BatchResult:
            if bisection.timed_out:
                shorten_timeouts(len(batch.only or ()))
            return walk.apply(batch, prepared)

        try:
            settled, state = self._settled(settle, state, self._counted)
        except (PeeweeException, HousekeepingError) as error:
            if not bisection.failed(batch.only, error):
                return state
            settled, state = self._single(walk, batch, state, error)
        else:
            bisection.succeeded()
        self._committed(walk, batch, settled, state)
        return state

    def _single(self, walk: Divisible, batch: Batch, state: _State, error: Exception) -> tuple[BatchResult, _State]:
        """Settle the row that failed another way, or give it up and count it."""
        assert batch.only is not None
        record = walk.describe(batch.only[0])

        def rescue() -> BatchResult:
            if is_timeout(error):
                shorten_timeouts(1)
            return walk.fallback(batch, error) or BatchResult(failures=[Failure(record, error)])

        try:
            return self._settled(rescue, state, self._counted)
        except (PeeweeException, HousekeepingError) as again:
            if not is_row_error(again):
                raise
            given_up = BatchResult(failures=[Failure(record, again)])
            return self._settled(lambda: given_up, state, self._counted)

    def _counted(self, before: _State, settled: BatchResult) -> _State:
        """Count a part of a batch, in the part's transaction."""
        state = replace(before, counts=added(before.counts, settled))
        runs.advance(self.run_id, state.counts, self._as_cursor(state), self._fence())
        return state

    def _ended_within(self, state: _State) -> _State:
        """End the run within a batch that is being bisected; the next run begins with what is left of it."""
        verdict: Verdict = ("partial", "shutdown") if self.stopping.is_set() else ("partial", "out_of_time")
        verdict = self._ended_between(state, _PAUSED if self._sizer.paused else verdict)
        return replace(state, counts=self.counts, verdict=verdict)

    def _pass_by(self, end: BatchResult, state: _State) -> None:
        """Move the cursor behind a batch, as far as the database can be reached."""
        try:
            with database.atomic():
                self._counted(self._following(state, end), BatchResult())
        except (PeeweeException, HousekeepingError) as error:
            logger.warning("Cursor could not be moved past the batch", error=error_line(error))

    def _must_stop(self) -> bool:
        """Return whether the run ends at once; also the moment to say that it is alive."""
        if self.lease is not None:
            self.lease[0].check()
        if time.monotonic() - self._beat_at > runs.HEARTBEAT.total_seconds():
            with database.atomic():
                self._sizer.heed(runs.beat(self.run_id))
            self._beat_at = time.monotonic()
        return self.stopping.is_set() or self._sizer.paused

    def _time_is_up(self) -> bool:
        """Return whether to take no new work; asked between outside effects, which may take long."""
        return self._must_stop() or self.budget.exceeded()

    def _check(self) -> None:
        """Ask the ledger, whatever our own clock says: it stands still while a machine is paused."""
        if self.lease is not None:
            self.lease[0].check()
        runs.check(self.run_id)

    def _fence(self) -> tuple[str, int] | None:
        return None if self.lease is None else (self.lease[0].key, self.lease[1])

    def _as_cursor(self, state: _State) -> Cursor | None:
        if state.after is None and state.place == 0:
            return None
        return {"pass": self.stages[state.place].name, "after": as_cursor(state.after)}

    def _from_cursor(self) -> _State:
        names = [each.name for each in self.stages]
        # A cursor of an older release may name a stage that no longer exists, or have other columns.
        if self.cursor is None or self.cursor["pass"] not in names:
            return _State(self.counts)
        after, place = self.cursor["after"], names.index(self.cursor["pass"])
        stage = self.stages[place]
        if after is not None and isinstance(stage, TableStage) and not stage.is_position(tuple(after)):
            return _State(self.counts)
        return _State(self.counts, place, None if after is None else tuple(after))
