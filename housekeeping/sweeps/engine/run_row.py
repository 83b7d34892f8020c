"""Row of a run in the ledger: it takes counts and cursor of each batch, and is closed with the last one."""

from __future__ import annotations

from dataclasses import replace

from housekeeping.core.errors import SameErrorRepeated
from housekeeping.database.connection import database
from housekeeping.sweeps.engine.counts import flagged
from housekeeping.sweeps.engine.run_context import RunProgress
from housekeeping.sweeps.engine.run_watch import RunWatch
from housekeeping.sweeps.engine.traversal import STOPPED, THROTTLED, RunState, Traversal, Verdict
from housekeeping.sweeps.ledger import runs
from housekeeping.sweeps.ledger.overrides import Override
from housekeeping.sweeps.ledger.run_start import Attempt
from housekeeping.sweeps.stages.stage import BatchResult


class RunRow:
    """Writer of one run's row.

    Attributes:
      left_stage: State in which the run first left a stage because the same error repeated, and the error that ends the
        run; None before.
    """

    def __init__(self, attempt: Attempt, progress: RunProgress, traversal: Traversal, watch: RunWatch) -> None:
        self.left_stage: tuple[RunState, SameErrorRepeated] | None = None
        self._run_id = attempt.run_id
        self._fence = attempt.fence
        self._progress = progress
        self._traversal = traversal
        self._watch = watch

    def advance(self, state: RunState) -> Override | None:
        """Write counts and cursor in the open transaction; return the worker's override."""
        return runs.advance(self._run_id, state.counts, self._traversal.cursor_at(state.place), self._fence)

    def close(self, state: RunState, verdict: Verdict, result: BatchResult) -> RunState:
        """Close the row in the open transaction. If the run ends with an error, leave it open for `record_end`."""
        counts = flagged(state.counts, verdict, self._watch.budget.exceeded)
        state = replace(state, counts=self._watch.row_limit.noted(counts, verdict[1]), verdict=verdict)
        if self.error_at_end(verdict, result) is None:
            self._finish(verdict, state)
        else:
            # The row stays open: it is closed as failed, with the error.
            place = self.left_stage[0].place if self.left_stage else state.place
            self.advance(replace(state, place=place))
        return state

    def end_between_batches(self, state: RunState, verdict: Verdict) -> Verdict:
        """Close the row in a transaction of its own, with the cursor of the last batch.

        Raises:
          BaseException: As `error_at_end`; the row stays open for it.
        """
        no_batch = BatchResult()
        if verdict == THROTTLED:
            state = replace(state, counts=state.counts | self._watch.throttle.as_count())
        with database.atomic():
            state = self.close(state, verdict, no_batch)
        self._progress.counts = state.counts
        if (error := self.error_at_end(verdict, no_batch)) is not None:
            raise error
        return verdict

    def error_at_end(self, verdict: Verdict, result: BatchResult) -> BaseException | None:
        """Return the error with which the run fails despite this verdict; None without one, or if it was stopped."""
        if verdict in STOPPED:
            return None
        return result.unreachable or (self.left_stage[1] if self.left_stage else None) or self._progress.preflight.error

    def _finish(self, verdict: Verdict, state: RunState) -> None:
        outcome, reason = verdict
        cursor = self._traversal.cursor_at(state.place)
        runs.finish(self._run_id, outcome, reason, counts=state.counts, cursor=cursor, fence=self._fence)
