"""Processing of a failed batch in smaller and smaller parts, until each bad row fails alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from peewee import PeeweeException

from housekeeping.core.errors import HousekeepingError
from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.connection import database
from housekeeping.sweeps.stages.bisection import Bisection, is_row_error, is_timeout, shorten_timeouts
from housekeeping.sweeps.stages.stage import Batch, BatchResult, Divisible, Failure

if TYPE_CHECKING:
    from housekeeping.sweeps.engine.executor import Executor
    from housekeeping.sweeps.engine.traversal import RunState

logger = named_logger(__name__)


class BatchBisection:
    """Processes one failed batch in parts, each in its own transaction. The cursor moves after the last part."""

    def __init__(self, executor: Executor, stage: Divisible, batch: Batch, prepared: Any, error: Exception) -> None:
        self._executor = executor
        self._stage = stage
        self._batch = batch
        self._prepared = prepared
        with database.atomic():
            self._positions = stage.positions(batch, prepared)
        self._bisection = Bisection(self._positions, error)

    def run(self, state: RunState) -> RunState:
        """Process the parts, then move the cursor past the batch."""
        executor, bisection = self._executor, self._bisection
        end = self._stage.after_all(self._batch, self._prepared, self._positions)
        part: Any = None
        try:
            while (part := bisection.next()) is not None:
                if executor.watch.must_stop() or bisection.took_too_long():
                    return executor.end_within_batch(state)
                state = self._process_part(part, state)
                if executor.streak.error is not None:
                    break
        except PeeweeException as error:
            if is_timeout(error):
                # The next run must not begin with a batch that cannot be processed.
                self._skip_batch(end, state)
            raise
        if executor.streak.error is not None and part is not None and not bisection.timed_out:
            end = BatchResult(position=part[-1], exhausted=False)  # the rows after it were not tried
        if bisection.timed_out:
            executor.sizer.shrink(state.place.stage, bisection.part_size)
        result, state = executor.commit(lambda: end, state, executor.record_batch)
        executor.after_commit(self._stage, self._batch, result, state)
        return executor.after_batch(result, state)

    def _process_part(self, part: Any, state: RunState) -> RunState:
        batch = replace(self._batch, only=part)
        try:
            result, state = self._executor.commit(partial(self._apply, batch), state, self._executor.record_part)
        except (PeeweeException, HousekeepingError) as error:
            if not self._bisection.failed(part, error):
                return state
            result, state = self._process_row(batch, state, error)
        else:
            self._bisection.succeeded()
        self._executor.after_commit(self._stage, batch, result, state)
        return state

    def _apply(self, batch: Batch) -> BatchResult:
        if self._bisection.timed_out:
            shorten_timeouts(len(batch.only or ()))
        return self._stage.apply(batch, self._prepared)

    def _process_row(self, batch: Batch, state: RunState, error: Exception) -> tuple[BatchResult, RunState]:
        """Try the fallback for the row that failed, or count it as failed."""
        assert batch.only is not None
        record = self._stage.describe(batch.only[0])

        def fall_back() -> BatchResult:
            if is_timeout(error):
                shorten_timeouts(1)
            return self._stage.fallback(batch, error) or BatchResult(failures=[Failure(record, error)])

        commit, record_part = self._executor.commit, self._executor.record_part
        try:
            return commit(fall_back, state, record_part)
        except (PeeweeException, HousekeepingError) as again:
            if not is_row_error(again):
                raise
            failed = BatchResult(failures=[Failure(record, again)])
            return commit(lambda: failed, state, record_part)

    def _skip_batch(self, end: BatchResult, state: RunState) -> None:
        """Move the cursor past the batch, or log that it could not be moved."""
        try:
            with database.atomic():
                self._executor.record_part(self._executor.continued(state, end), BatchResult())
        except (PeeweeException, HousekeepingError) as error:
            logger.warning("Cursor could not be moved past the batch", error=error_line(error))
