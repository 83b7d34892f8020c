"""Loop of a run: one batch after another, each with its own commit, until nothing is left or the run must stop.

`Executor.run` is the loop, `Executor._process_batch` one batch. Most batches are a single statement (`one_round_trip`);
the others are a transaction (`Executor.commit`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Final

from peewee import OperationalError, PeeweeException

from housekeeping.core.clock import RunBudget
from housekeeping.core.errors import HousekeepingError, SameErrorRepeated
from housekeeping.core.sanitize import error_line, shortened
from housekeeping.core.telemetry.context import span
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.connection import database, is_connection_lost, sqlstate
from housekeeping.sweeps.engine.announcing import Announcer
from housekeeping.sweeps.engine.batch_sizing import BatchSizer
from housekeeping.sweeps.engine.counts import added
from housekeeping.sweeps.engine.failures.batch_bisection import BatchBisection
from housekeeping.sweeps.engine.failures.failure_streak import MOST_FAILURES, FailureStreak
from housekeeping.sweeps.engine.one_round_trip import OneRoundTrip
from housekeeping.sweeps.engine.run_context import RunProgress, RunRequest
from housekeeping.sweeps.engine.run_lease import RunLease
from housekeeping.sweeps.engine.run_row import RunRow
from housekeeping.sweeps.engine.run_watch import RunWatch
from housekeeping.sweeps.engine.traversal import DONE, OUT_OF_TIME, PAUSED, THROTTLED, RunState, Traversal, Verdict
from housekeeping.sweeps.ledger.overrides import Override
from housekeeping.sweeps.ledger.run_start import Attempt
from housekeeping.sweeps.limits.breaker import RowLimit
from housekeeping.sweeps.limits.throttled_tables import throttled_tables
from housekeeping.sweeps.stages.bisection import is_row_error, is_timeout
from housekeeping.sweeps.stages.stage import Batch, BatchResult, Divisible, Stage
from housekeeping.sweeps.stages.table_stage import TableStage

logger = named_logger(__name__)

#: PostgreSQL's codes for errors after which the same transaction may succeed: serialization failure, deadlock.
_RETRYABLE: Final = ("40001", "40P01")
_TRIES: Final = 4
_LONGEST_ERROR: Final = 300  # characters of an error in a log line
_LOCK_TIMEOUT: Final = "55P03"


class Executor:
    """Processes the batches of one run.

    Parameters:
      now: The time that staleness is measured against.
      override: What operators had set for the worker when the run began. Each batch reads it again.
      row_limit: The breaker's limit for this run; None for any number of rows.
    """

    def __init__(
        self,
        request: RunRequest,
        progress: RunProgress,
        attempt: Attempt,
        stages: Sequence[Stage],
        *,
        now: datetime,
        budget: RunBudget,
        lease: RunLease,
        override: Override | None,
        row_limit: RowLimit | None,
    ) -> None:
        self._request = request
        self._progress = progress
        self._run_id = attempt.run_id
        self._rejected_until = attempt.rejected_until
        self._stages = stages
        self._now = now
        self._traversal = Traversal(stages, attempt.cursor)
        self._announcer = Announcer(request.sweep.name, attempt.run_id)
        self._one_round_trip = OneRoundTrip(request.sweep.name, attempt)
        target = request.sweep.target_batch
        self.sizer = BatchSizer(stages, target, budget, progress.clock, ignores_pause=request.force)
        self.sizer.apply(override)
        self.watch = RunWatch(
            request,
            progress,
            attempt.run_id,
            tables=throttled_tables(stages, now),
            budget=budget,
            lease=lease,
            row_limit=row_limit or RowLimit(),
            sizer=self.sizer,
            one_round_trip=self._one_round_trip,
        )
        self._row = RunRow(attempt, progress, self._traversal, self.watch)
        self.streak = FailureStreak()

    def run(self) -> Verdict:
        """Process batches until the run ends, close its row, and return the verdict.

        The loop ends, because each batch moves the position forward or is the last one of its stage.

        Raises:
          LeaseLost, RunTakenOver: The current batch is rolled back, those before it stay.
          peewee.PeeweeException: The database failed the current batch; those before it stay.
          BaseException: An error that the run ends with after all batches; they stay.
        """
        state = RunState(self._progress.counts, self._traversal.start)
        is_first = True
        while state.verdict is None:
            self.watch.check_lease()
            verdict = self.watch.wait(is_first=is_first)
            if verdict is not None:
                return self._row.end_between_batches(state, verdict)
            is_first, before = False, state.counts
            self.watch.pace.begin()
            try:
                state = self._process_batch(state)
            except OperationalError as error:
                # A throttled run whose batch waits for locks ends early instead of failing; the next run resumes.
                if not self.watch.throttle.is_active or sqlstate(error) != _LOCK_TIMEOUT:
                    raise
                # A bisected batch may have committed some of its parts.
                return self._row.end_between_batches(replace(state, counts=self._progress.counts), THROTTLED)
            self.watch.pace.end(before, state.counts)
        self._progress.saw_everything = (
            state.verdict[0] == "done" and self._request.sweep.shards == 1 and self._traversal.sees_everything()
        )
        return state.verdict

    def _process_batch(self, state: RunState) -> RunState:
        """Process and commit one batch. Bisect it if a row makes it fail."""
        number = state.place.stage
        rows_left = self.watch.rows_left(state.counts)
        if self.watch.throttle.is_active:
            self.sizer.ease(number)
        stage = self.sizer.sized(number, self._stages[number], rows_left)
        batch = Batch(
            self._request.sweep.name,
            self._run_id,
            self._now,
            state.place.after,
            state.place.stage_end,
            self._request.argument,
            self.watch.time_is_up,
            check=self.watch.check,
            most=rows_left,
            rejected_until=self._rejected_until,
        )
        with self.sizer.measured(number, stage, self.watch.throttle.took if self.watch.throttle.measures else None):
            prepared = stage.prepare(batch)
            try:
                if isinstance(stage, TableStage) and self._fits_one_round_trip(stage, state):
                    result, state = self._commit_in_one_round_trip(stage, batch, state)
                else:
                    result, state = self.commit(partial(stage.apply, batch, prepared), state, self.record_batch)
            except (PeeweeException, HousekeepingError) as error:
                if not isinstance(stage, Divisible) or not is_row_error(error):
                    raise
                logger.warning("A batch failed and is bisected", error=shortened(error_line(error), _LONGEST_ERROR))
                return BatchBisection(self, stage, batch, prepared, error).run(state)
            self.after_commit(stage, batch, result, state)
            return self.after_batch(result, state)

    def _fits_one_round_trip(self, stage: TableStage, state: RunState) -> bool:
        return (
            type(stage).apply is TableStage.apply
            and not self._announcer.needs_transaction(stage)
            and set(stage.action.counted_as) <= set(state.counts)
        )

    def _commit_in_one_round_trip(
        self, stage: TableStage, batch: Batch, before: RunState
    ) -> tuple[BatchResult, RunState]:
        """Commit the batch in one statement. If it fails, process the batch in a transaction, which shows the cause."""
        ends_stage = BatchResult(position=batch.after)
        ends_run = self.continued(before, ends_stage).verdict == DONE and stage.position_after(batch, None, 0)[1]
        try:
            done = self._one_round_trip.commit(
                stage,
                batch,
                counts=before.counts,
                cursor=self._traversal.cursor_at(before.place),
                ends_run=ends_run and self._row.error_at_end(DONE, ends_stage) is None,
            )
        except (PeeweeException, HousekeepingError) as error:
            if is_timeout(error):
                raise
            found = self._one_round_trip.after_lost_answer(before, error) if is_connection_lost(error) else None
            if found is not None:
                return found
            level = logging.WARNING if sqlstate(error) in _RETRYABLE else logging.DEBUG
            logger.log(level, "Batch is retried", error=shortened(error_line(error), _LONGEST_ERROR))
            return self.commit(partial(stage.apply, batch, None), before, self.record_batch)
        if done.result.rows:
            self._announcer.collect(stage, done.result)
        self.sizer.apply(done.override)
        state = replace(self.continued(before, done.result), counts=added(before.counts, done.result))
        if done.is_closed:
            return done.result, state
        verdict = self.watch.verdict(state, done.result)
        if verdict is None and not self.sizer.is_paused:
            return done.result, state
        with database.atomic():
            return done.result, self._row.close(state, verdict or PAUSED, done.result)

    def commit(
        self,
        apply: Callable[[], BatchResult],
        state: RunState,
        record: Callable[[RunState, BatchResult], RunState],
    ) -> tuple[BatchResult, RunState]:
        """Commit the changes of `apply` together with their counts; retry after a deadlock."""
        self._one_round_trip.heartbeat_at = None
        for tries_left in reversed(range(_TRIES)):
            try:
                with span("housekeeping.batch"), database.atomic():
                    result = apply()
                    self._announcer.announce(self._stages[state.place.stage], result)
                    return result, record(state, result)
            except OperationalError as error:
                if sqlstate(error) not in _RETRYABLE or not tries_left:
                    raise
                logger.warning("Batch is retried", error=shortened(error_line(error), _LONGEST_ERROR))
        raise AssertionError("the last try returns or raises")

    def record_batch(self, before: RunState, result: BatchResult) -> RunState:
        """Write counts and cursor in the batch's transaction. Close the run's row after the last batch."""
        state = self.continued(before, result)
        state = replace(state, counts=added(before.counts, result))
        verdict = self.watch.verdict(state, result)
        if verdict is None:
            self.sizer.apply(self._row.advance(state))
            if not self.sizer.is_paused:
                return state
            verdict = PAUSED
        return self._row.close(state, verdict, result)

    def record_part(self, before: RunState, result: BatchResult) -> RunState:
        """Write the counts of a part of a batch, in the part's transaction."""
        state = replace(before, counts=added(before.counts, result))
        self._row.advance(state)
        return state

    def continued(self, before: RunState, result: BatchResult) -> RunState:
        """Return the state at the place where the run continues, with the verdict ``done`` if nothing is left."""
        place = self._traversal.next(before.place, result, may_restart=self._row.left_stage is None)
        if place is None:
            return replace(before, place=replace(before.place, after=result.position), verdict=DONE)
        return replace(before, place=place)

    def after_commit(self, stage: Stage, batch: Batch, result: BatchResult, state: RunState) -> None:
        """Report a committed batch: update the progress, log its rows and send its events."""
        self._progress.counts = state.counts
        self._progress.position = state.place.after
        assert self._progress.rejections is not None
        self._progress.rejections.add(result)
        stage.after_commit(batch, result)
        self._announcer.after_commit()
        if self._request.on_batch is not None:
            self._request.on_batch(state.counts)
        # A restore always begins at the front, so the next one could not continue behind the rows that fail.
        if isinstance(stage, TableStage) and not stage.newest_first:
            self.streak.add(result)

    def after_batch(self, result: BatchResult, state: RunState) -> RunState:
        """Return the state after a batch. Leave its stage if the same error keeps every row from changing.

        Raises:
          BaseException: The error that the run ends with, when this was its last batch.
        """
        if state.verdict is None and self.streak.error is not None and not result.exhausted:
            return self._leave_stage(state)
        self.streak.error = None
        if state.verdict is not None and (error := self._row.error_at_end(state.verdict, result)) is not None:
            raise error
        return state

    def _leave_stage(self, state: RunState) -> RunState:
        """Continue with the next stage. The run ends as failed; the next run resumes after the rows that failed."""
        if self._row.left_stage is None:
            text = f"{MOST_FAILURES} rows in a row failed with the same error: {self.streak.error}"
            self._row.left_stage = state, SameErrorRepeated(text)
        self.streak.reset()
        leave = BatchResult(position=state.place.after)
        result, state = self.commit(lambda: leave, state, self.record_batch)
        return self.after_batch(result, state)

    def end_within_batch(self, state: RunState) -> RunState:
        """End the run within a batch that is being bisected; the next run begins with the rest of it."""
        verdict = self._row.end_between_batches(state, self.watch.stopped() or OUT_OF_TIME)
        return replace(state, counts=self._progress.counts, verdict=verdict)
