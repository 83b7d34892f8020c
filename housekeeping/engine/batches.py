"""Loop of a run: one batch after another, each with its own commit, until nothing is left or the run must stop.

`Batches.process` is the loop, `Batches._process_batch` one batch. A batch that fails is bisected until each row that
makes it fail is alone; rows behind such rows are processed all the same. After too many of them in a row the run leaves
the stage and fails, and the next one continues there.

The statement that deletes or changes the rows of a batch is in `sweeps.table_stage`; `commit` adds the ledger to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Final

from peewee import PeeweeException

from housekeeping.core.clock import RunBudget
from housekeeping.core.errors import HousekeepingError, TooManyRowsFailed
from housekeeping.core.logs import counted, error_line, shortened
from housekeeping.core.logs import logger as named_logger
from housekeeping.database.connection import database
from housekeeping.database.errors import is_conflict, is_connection_lost, is_lock_timeout, is_timeout
from housekeeping.engine import (
    DONE,
    OUT_OF_TIME,
    PAUSED,
    SHUTDOWN,
    STOPPED,
    THROTTLED,
    RunRequest,
    RunState,
    Verdict,
    added,
    flagged,
)
from housekeeping.engine.commit import LONGEST_ERROR, Commit
from housekeeping.engine.failures import Bisection, NoRowSucceeded, is_row_error, may_concern_all_rows, shorten_timeouts
from housekeeping.engine.guard import RowLimit
from housekeeping.engine.speed import Speed, ThrottleWatch, throttled_tables
from housekeeping.ledger import runs
from housekeeping.ledger.operators import Override
from housekeeping.ledger.runs import Counts, Cursor, RunRow, RunStart
from housekeeping.sweeps.actions import BLOCKED
from housekeeping.sweeps.stage import DETAILS, Batch, BatchResult, Divisible, Failure, Position, Stage, as_cursor
from housekeeping.sweeps.table_stage import TableStage, counts_rows

logger = named_logger(__name__)

#: After this many failed rows in a row a run leaves the stage, if the next one can resume behind them. They take some
#: seconds.
MOST_FAILURES: Final = 1000
#: Failed rows in a row after which a run whose time is up fails, so that the next one resumes behind them.
FEW_FAILURES: Final = 20
#: Seconds after which a wait between batches looks at pauses, the lease and the heartbeat.
_LONGEST_WAIT_S: Final = 1.0
#: Verdicts of a run that was interrupted. It does not fail with a pending error, because the next run meets it as well.
_INTERRUPTED: Final = (SHUTDOWN, PAUSED, STOPPED)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the next batch begins. It becomes the cursor from which the next run resumes.

    Attributes:
      stage: The number of the stage.
      after: The position in that stage; None for its front.
      until: Stage and position at which the run ends after it has started again at the front; None before that.
    """

    stage: int = 0
    after: Position | None = None
    until: tuple[int, Position | None] | None = None

    @property
    def stage_end(self) -> Position | None:
        """Last position of this stage, for a run that has started again; otherwise None."""
        return self.until[1] if self.until is not None and self.until[0] == self.stage else None


class Traversal:
    """Stages of a run in order.

    A resumed run that comes to the end starts again at the front, and ends where it began.

    Parameters:
      cursor: Where an earlier run stopped, from its row in the ledger; None to start at the front.
    """

    def __init__(self, stages: Sequence[Stage], cursor: Cursor | None) -> None:
        self._stages = stages
        self.start = self._place_of(cursor)
        #: Whether every stage can end at a given position, as a `TableStage` can; others restart themselves.
        self._can_restart = all(isinstance(each, TableStage) for each in stages)
        is_resumed = (self.start.stage, self.start.after) != (0, None)
        self._restarts = is_resumed and self._can_restart
        #: Whether a run that ends as ``done`` has looked at every row.
        self.sees_everything = not is_resumed or self._can_restart

    def next(self, place: Place, result: BatchResult) -> Place | None:
        """Return where the run continues after a batch; None at the end."""
        if not result.exhausted:
            return replace(place, after=result.position)
        until = place.until
        last = len(self._stages) - 1 if until is None else until[0] - (until[1] is None)
        if place.stage < last:
            return replace(place, stage=place.stage + 1, after=None)
        if self._restarts and until is None:
            return Place(until=(self.start.stage, self.start.after))
        return None

    def cursor_at(self, place: Place) -> Cursor | None:
        """Return the place as the ledger stores it; None for the front of the first stage."""
        if place.after is None and place.stage == 0:
            return None
        return {"pass": self._stages[place.stage].name, "after": as_cursor(place.after)}

    def _place_of(self, cursor: Cursor | None) -> Place:
        names = [each.name for each in self._stages]
        # The declaration may have changed since: it may lack the stage, or have columns of other types.
        if cursor is None or cursor["pass"] not in names:
            return Place()
        number = names.index(cursor["pass"])
        after = None if cursor["after"] is None else tuple(cursor["after"])
        stage = self._stages[number]
        if after is not None and isinstance(stage, TableStage) and not stage.is_position(after):
            return Place()
        return Place(number, after)


#: What a commit makes true: the run's counts, where it continues, and how it ends (None: it continues).
_After = tuple[Counts, Place, Verdict | None]


#: Rows that have failed since the last one that was changed, and the error of the last of them.
_Failing = tuple[int, BaseException | None]


class Batches:
    """The batches of one run.

    Parameters:
      state: The run; its counts and position follow each commit.
      begun: The run's row.
      now: The time that staleness is measured against.
      check_lease: Raises LeaseLost unless the lease is still held.
      override: What operators had set for the worker when the run began. Each batch reads it again.
      row_limit: The most rows that the run may process.
    """

    def __init__(
        self,
        request: RunRequest,
        state: RunState,
        begun: RunStart,
        stages: Sequence[Stage],
        *,
        now: datetime,
        budget: RunBudget,
        check_lease: Callable[[], None],
        override: Override | None,
        row_limit: RowLimit,
    ) -> None:
        sweep = request.sweep
        self._request = request
        self._state = state
        self._run_id = begun.run_id
        self._rejected_until = begun.rejected_until
        self._details = _details_of(begun.history)
        self._stages = stages
        self._now = now
        self._budget = budget
        self._check_lease = check_lease
        self._row_limit = row_limit
        self._traversal = Traversal(stages, begun.cursor)
        self._place = self._traversal.start
        self._verdict: Verdict | None = None
        self._commits = 0
        self._commit = Commit(sweep.name, begun, sweep.texts)
        tables = throttled_tables(stages, now)
        self._throttle = ThrottleWatch(sweep.limits.throttle, tables, budget, request.stopping.wait)
        self._speed = Speed(sweep, stages, budget, state.clock, self._throttle, ignores_pause=request.force)
        self._speed.apply(override)
        self._failing: _Failing = (0, None)
        #: Stages that have changed rows in this run.
        self._changed: set[int] = set()
        #: Place from which the run first left rows that it did not try, and the error that ends it; None before.
        self._left_stage: tuple[Place, BaseException] | None = None
        #: The error that the run ends with, set when it closes its row.
        self._error: BaseException | None = None
        self._heartbeat_at = time.monotonic()

    def process(self) -> Verdict:
        """Process batches until the run ends, close its row, and return the verdict.

        The loop ends, because each batch moves the position forward or is the last one of its stage.

        Raises:
          LeaseLost, RunTakenOver: The current batch is rolled back, those before it stay.
          peewee.PeeweeException: The database failed the current batch; those before it stay.
          BaseException: An error that the run ends with after all batches; they stay.
        """
        is_first = True
        while self._verdict is None:
            self._check_lease()
            verdict = self._wait(is_first=is_first)
            if verdict is not None:
                return self._end_between_batches(verdict)
            is_first = False
            try:
                self._process_batch()
            except PeeweeException as error:
                # A throttled run whose batch waits for locks ends early instead of failing; the next run resumes.
                if not self._is_throttled_by(error):
                    raise
                return self._end_between_batches(THROTTLED)
        self._state.saw_everything = self._verdict == DONE and self._traversal.sees_everything
        return self._verdict

    def _process_batch(self) -> None:
        """Process and commit one batch. Bisect it if a row makes it fail."""
        place = self._place
        rows_left = self._rows_left()
        stage = self._speed.next_stage(place.stage, rows_left)
        batch = self._batch(place, rows_left)
        with self._speed.measured(place.stage, lambda: self._state.counts):
            prepared = stage.prepare(batch)
            try:
                result = self._commit_batch(stage, batch, prepared)
            except (PeeweeException, HousekeepingError) as error:
                if not isinstance(stage, Divisible) or not is_row_error(error):
                    raise
                logger.warning("A batch failed and is bisected", error=shortened(error_line(error), LONGEST_ERROR))
                self._bisect(stage, batch, prepared, error)
                return
            self._committed(place, stage, batch, result)
            self._after_batch(result)

    def _commit_batch(self, stage: Stage, batch: Batch, prepared: Any) -> BatchResult:
        """Commit a batch: in one statement if it fits, and in a transaction if that fails, which shows the cause."""
        place, counts, apply = self._place, self._state.counts, partial(stage.apply, batch, prepared)
        if not isinstance(stage, TableStage):
            return self._commit_whole(apply, place)
        expected = stage.expected(batch, prepared)
        if expected is None and not self._commit.fits_one_statement(stage, counts):
            return self._commit_whole(apply, place)
        ends_stage = BatchResult(position=batch.after)
        is_last = self._traversal.next(place, ends_stage) is None and stage.position_after(batch, None, 0)[1]
        cursor = self._traversal.cursor_at(place)
        look = partial(self._speed.look, place.stage) if self._speed.must_look(place.stage) else None
        try:
            if expected is None:
                result, override, is_closed, nothing_left = self._commit.in_one_statement(
                    stage,
                    batch,
                    counts=counts,
                    cursor=cursor,
                    ends_run=is_last and self._error_at_end(DONE, ends_stage) is None,
                    all_stages=self._stages_to_count(place),
                    look=look,
                )
            else:
                result, override = self._commit.as_expected(
                    expected, counts=added(counts, expected.result), cursor=cursor, look=look
                )
                is_closed = nothing_left = False
        except (PeeweeException, HousekeepingError) as error:
            if is_timeout(error) and (expected is None or not is_lock_timeout(error)):
                raise
            found = self._commit.after_lost_answer(error) if is_connection_lost(error) else None
            if found is None:
                if is_conflict(error):
                    logger.warning("Batch is retried", error=shortened(error_line(error), LONGEST_ERROR))
                return self._commit_whole(apply, place)
            after = tuple(found.cursor["after"]) if found.cursor and found.cursor["after"] else None
            is_closed, nothing_left, counts = found.outcome == "done", False, found.counts
            result = BatchResult(position=after, exhausted=is_closed)
        else:
            self._speed.apply(override)
            counts = added(counts, result)
        self._state.nothing_left = is_closed and nothing_left
        place, done = self._continued(place, result)
        verdict = done if is_closed else self._verdict_after(counts, result, done)
        if verdict is not None and not is_closed:
            with database.atomic():
                counts = self._close(counts, place, verdict, result)
        self._take((counts, place, verdict))
        return result

    def _stages_to_count(self, place: Place) -> Sequence[TableStage]:
        """Return all stages if a batch at this place can count the run's backlog in its own statement; else none.

        The batch must be the only one of the last stage, after one of each earlier stage. In a longer run, rows become
        stale meanwhile.
        """
        stages = [each for each in self._stages if isinstance(each, TableStage) and counts_rows(each)]
        is_only = place == Place(len(self._stages) - 1) and self._commits == place.stage
        return stages if is_only and len(stages) == len(self._stages) and self._request.sweep.records_backlog else ()

    def _commit_whole(self, apply: Callable[[], BatchResult], place: Place) -> BatchResult:
        """Commit a batch with counts and cursor. Close the run's row after the last one."""

        def record(result: BatchResult) -> _After:
            self._speed.look(place.stage)
            counts = added(self._state.counts, result)
            after, done = self._continued(place, result)
            verdict = self._verdict_after(counts, result, done)
            if verdict is None:
                self._speed.apply(self._commit.advance(counts, self._traversal.cursor_at(after)))
                verdict = self._stopped()
                if verdict is None:
                    return counts, after, None
            return self._close(counts, after, verdict, result), after, verdict

        result, after = self._commit.in_transaction(self._stages[place.stage], apply, record)
        self._take(after)
        return result

    def _commit_part(self, apply: Callable[[], BatchResult]) -> BatchResult:
        """Commit a part of a batch with its counts. The cursor stays before the batch."""
        place = self._place

        def record(result: BatchResult) -> _After:
            counts = added(self._state.counts, result)
            self._speed.apply(self._commit.advance(counts, self._traversal.cursor_at(place)))
            return counts, place, None

        result, after = self._commit.in_transaction(self._stages[place.stage], apply, record)
        self._take(after)
        return result

    def _take(self, after: _After) -> None:
        self._state.counts, self._place, self._verdict = after
        self._commits += 1

    def _close(self, counts: Counts, place: Place, verdict: Verdict, result: BatchResult) -> Counts:
        """Close the row in the open transaction, and return its counts.

        If the run ends with an error, the row stays open: it is closed as failed, with the error.
        """
        counts = self._row_limit.noted(flagged(counts, verdict, self._budget.exceeded), verdict[1])
        self._error = self._error_at_end(verdict, result)
        if self._error is None:
            self._commit.close(verdict, counts, self._traversal.cursor_at(place))
        else:
            place = self._left_stage[0] if self._left_stage else place
            self._commit.advance(counts, self._traversal.cursor_at(place))
        return counts

    def _end_between_batches(self, verdict: Verdict) -> Verdict:
        """Close the row in a transaction of its own, with the cursor of the last batch.

        Raises:
          BaseException: As `_error_at_end`; the row stays open for it.
        """
        counts, no_batch = self._state.counts, BatchResult()
        if verdict == THROTTLED:
            counts = counts | self._throttle.as_count()
        with database.atomic():
            counts = self._close(counts, self._place, verdict, no_batch)
        self._state.counts = counts
        if self._error is not None:
            raise self._error
        return verdict

    def _committed(self, place: Place, stage: Stage, batch: Batch, result: BatchResult) -> None:
        """Report a committed batch that began at this place: log its rows and send its events."""
        self._state.position = self._place.after
        assert self._state.rejections is not None
        self._state.rejections.add(result)
        stage.after_commit(batch, result)
        self._commit.send_events()
        if self._request.on_batch is not None:
            self._request.on_batch(self._state.counts)
        if _has_changed_rows(result):
            self._changed.add(place.stage)
        self._failing = self._failing_after(stage, result)

    def _batch(self, place: Place, most: int | None) -> Batch:
        return Batch(
            self._request.sweep.name,
            self._run_id,
            self._now,
            place.after,
            place.stage_end,
            self._request.argument,
            self._time_is_up,
            check=self._check,
            most=most,
            rejected_until=self._rejected_until,
            spent=self._budget.share,
            details=self._details,
        )

    def _rows_left(self) -> int | None:
        """Return the most rows that breaker and pace allow in the next batch; None: any number."""
        limits = (self._row_limit.left(self._state.counts), self._speed.most_rows)
        return min((each for each in limits if each is not None), default=None)

    def _continued(self, place: Place, result: BatchResult) -> tuple[Place, Verdict | None]:
        """Return the place where the run continues; with the verdict ``done`` if nothing is left."""
        following = self._traversal.next(place, result)
        return (replace(place, after=result.position), DONE) if following is None else (following, None)

    def _verdict_after(self, counts: Counts, result: BatchResult, done: Verdict | None) -> Verdict | None:
        """Return the verdict of a run that ends after this batch; None: it continues."""
        if result.stop is not None:
            return "partial", result.stop
        if done is not None:
            return done
        if (reached := self._row_limit.reached(counts)) is not None:
            return reached
        return self._stopped() or (OUT_OF_TIME if self._budget.exceeded() else None)

    def _after_batch(self, result: BatchResult) -> None:
        """Leave the stage if row after row fails.

        Raises:
          BaseException: The error that the run ends with, when this was its last batch.
        """
        if self._verdict is None:
            if self._rows_keep_failing() and not result.exhausted:
                self._leave_stage(BatchResult(position=self._place.after), _too_many_failed(self._failing))
        elif self._error is not None:
            raise self._error

    def _rows_keep_failing(self) -> bool:
        """Return whether so many rows in a row failed that the next run should continue behind them, if it can."""
        return self._failing[0] >= MOST_FAILURES and self._request.resume != "never"

    def _failing_after(self, stage: Stage, result: BatchResult) -> _Failing:
        """Return how many rows in a row have failed once this batch of the stage is committed."""
        if _has_changed_rows(result):
            return 0, None
        if result.failures and isinstance(stage, TableStage):
            return self._failing[0] + len(result.failures), result.failures[-1].error
        return self._failing

    def _error_at_end(self, verdict: Verdict, result: BatchResult) -> BaseException | None:
        """Return the error with which the run fails despite this verdict; None without one, or if it was stopped."""
        if verdict in _INTERRUPTED:
            return None
        if result.unreachable is not None:
            return result.unreachable
        if self._left_stage is not None:
            return self._left_stage[1]
        # After an error the next run resumes. One that begins at the front would spend its time on the same rows.
        failing = self._failing_after(self._stages[self._place.stage], result)
        is_stuck = failing[0] >= FEW_FAILURES and self._request.resume == "interrupted"
        return _too_many_failed(failing) if verdict == OUT_OF_TIME and is_stuck else None

    def _is_throttled_by(self, error: BaseException) -> bool:
        return self._throttle.is_active and is_lock_timeout(error)

    def _wait(self, *, is_first: bool) -> Verdict | None:
        """Wait until the next batch may begin. Return the verdict if the run ends here; None if it continues.

        A run always processes its first batch, so that a throttle cannot stop the work altogether.
        """
        if (verdict := self._wait_for_pace()) is not None:
            return verdict
        if self._throttle.hold(self._time_is_up) is None:
            return None
        return self._stopped() or (None if is_first else THROTTLED)

    def _wait_for_pace(self) -> Verdict | None:
        left_s = self._speed.wait_s()
        if left_s > 0 and left_s > self._budget.left():
            return OUT_OF_TIME  # without waiting for it
        while left_s > 0:
            wait_s = min(left_s, _LONGEST_WAIT_S)
            self._request.stopping.wait(wait_s)
            if left_s >= _LONGEST_WAIT_S:
                self._read_override()
            if self._must_stop():
                return self._stopped()
            # A clock that is set, as in tests, may stand still.
            left_s = min(left_s - wait_s, self._speed.wait_s())
        return None

    def _read_override(self) -> None:
        """Read the run's override between two batches, so that a pause or a stop ends a long wait."""
        try:
            self._speed.apply(runs.check(self._run_id))
        except PeeweeException as error:
            if not is_connection_lost(error):  # the next batch connects again
                raise

    def _stopped(self) -> Verdict | None:
        """Return the verdict of a run that a stop, a shutdown or a pause ends; None if it continues."""
        if self._speed.stopped == "stopped":
            return STOPPED  # also during a shutdown, after which the message would run again
        if self._request.stopping.is_set():
            return SHUTDOWN
        return None if self._speed.stopped is None else PAUSED

    def _must_stop(self) -> bool:
        """Return whether the run ends at once; send a heartbeat if one is due."""
        self._check_lease()
        if time.monotonic() - self._heartbeat_at > runs.HEARTBEAT.total_seconds():
            self._speed.apply(self._commit.beat())
            self._heartbeat_at = time.monotonic()
        return self._stopped() is not None

    def _time_is_up(self) -> bool:
        """Return whether the run must end, so that a stage starts no further effect outside. Sends due heartbeats."""
        return self._must_stop() or self._budget.exceeded()

    def _check(self) -> None:
        """Raise unless the run's ledger row is still open.

        The lease alone is not proof: its clock stops while a machine sleeps.
        """
        self._check_lease()
        self._speed.apply(runs.check(self._run_id))

    def _bisect(self, stage: Divisible, batch: Batch, prepared: Any, error: Exception) -> None:
        """Process a failed batch in parts, each in its own transaction. The cursor moves after the last part."""
        place = self._place
        try:
            with database.atomic():
                positions = stage.positions(batch, prepared)
        except PeeweeException as unreadable:
            if not is_row_error(unreadable):
                raise
            # Its rows cannot be read, so none of them counts as failed.
            self._leave_stage(BatchResult(position=batch.after), unreadable)
            return
        probes = may_concern_all_rows(error, has_changed_rows=place.stage in self._changed)
        bisection = Bisection(positions, error, probes=probes)
        end = stage.after_all(batch, prepared, positions)
        part: Sequence[Position] | None = None
        try:
            while (part := bisection.next()) is not None:
                if self._must_stop():
                    self._verdict = self._end_between_batches(self._stopped() or SHUTDOWN)
                    return
                if bisection.took_too_long():
                    text = shortened(error_line(error), LONGEST_ERROR)
                    logger.warning("Rows are left to the next run", error=text)
                    self._left_stage = self._left_stage or (place, error)
                    break
                self._process_part(stage, replace(batch, only=part), prepared, bisection)
                for position, cause in bisection.bad_rows():
                    self._process_row(stage, replace(batch, only=[position]), cause)
                if self._rows_keep_failing() and not bisection.timed_out:
                    end = replace(end, position=part[-1], exhausted=False)  # the rows after it were not tried
                    break
        except NoRowSucceeded as none:
            assert none.__cause__ is not None
            self._leave_stage(end, none.__cause__)
            return
        if bisection.timed_out and not is_lock_timeout(error):
            self._speed.shrink(place.stage, bisection.part_size)
        self._commit_whole(lambda: end, place)
        self._committed(place, stage, batch, end)
        self._after_batch(end)

    def _process_part(self, stage: Divisible, batch: Batch, prepared: Any, bisection: Bisection[Position]) -> None:
        part = batch.only or ()

        def apply() -> BatchResult:
            if bisection.timed_out:
                shorten_timeouts(len(part))
            return stage.apply(batch, prepared)

        try:
            result = self._commit_part(apply)
        except (PeeweeException, HousekeepingError) as error:
            bisection.failed(part, error)
        else:
            bisection.succeeded()
            self._committed(self._place, stage, batch, result)

    def _process_row(self, stage: Divisible, batch: Batch, error: BaseException) -> None:
        """Try the fallback for the row that failed, or count it as failed."""
        assert batch.only is not None
        record = stage.describe(batch.only[0])

        def fall_back() -> BatchResult:
            if is_timeout(error):
                shorten_timeouts(1)
            # A row that waited for a lock is as good as any other once the lock is gone.
            rescued = None if is_lock_timeout(error) else stage.fallback(batch, error)
            return rescued or BatchResult(failures=[Failure(record, error)])

        try:
            result = self._commit_part(fall_back)
        except (PeeweeException, HousekeepingError) as again:
            if not is_row_error(again):
                raise
            failed = BatchResult(failures=[Failure(record, again)])
            result = self._commit_part(lambda: failed)
        self._committed(self._place, stage, batch, result)

    def _leave_stage(self, end: BatchResult, error: BaseException) -> None:
        """Continue with the next stage. The run ends with the error; the next one resumes behind the failed rows."""
        if self._is_throttled_by(error):
            raise error
        self._failing = (0, None)
        stage = self._stages[self._place.stage]
        position = stage.resumes_at(end.position) if isinstance(stage, TableStage) else end.position
        place = replace(self._place, after=position)
        self._left_stage = self._left_stage or (place, error)
        leave = BatchResult(position=position)
        self._commit_whole(lambda: leave, place)
        self._after_batch(leave)


def _details_of(history: Sequence[RunRow]) -> list[dict[str, Any]]:
    """Return the details of the last runs, back to the last one that reached the end."""
    found = []
    for row in history:
        found.append(row.counts.get(DETAILS) or {})
        if row.outcome == "done":
            break
    return found


def _has_changed_rows(result: BatchResult) -> bool:
    return any(number for name, number in result.counts.items() if name not in (BLOCKED, DETAILS))


def _too_many_failed(failing: _Failing) -> BaseException:
    rows, last = failing
    assert last is not None
    return TooManyRowsFailed(f"{counted(rows, 'row')} in a row failed, the last one with: {error_line(last)}")
