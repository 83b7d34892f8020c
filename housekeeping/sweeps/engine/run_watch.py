"""What may end a run between its batches, or make it wait: shutdown, pause, lease, time, pace and throttle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from peewee import PeeweeException

from housekeeping.core.clock import RunBudget
from housekeeping.database.connection import database, is_connection_lost
from housekeeping.sweeps.engine.batch_sizing import BatchSizer
from housekeeping.sweeps.engine.one_round_trip import OneRoundTrip
from housekeeping.sweeps.engine.run_context import RunProgress, RunRequest
from housekeeping.sweeps.engine.run_lease import RunLease
from housekeeping.sweeps.engine.traversal import OUT_OF_TIME, PAUSED, SHUTDOWN, THROTTLED, RunState, Verdict
from housekeeping.sweeps.ledger import runs
from housekeeping.sweeps.ledger.overrides import override_of
from housekeeping.sweeps.ledger.runs import Counts
from housekeeping.sweeps.limits.breaker import RowLimit
from housekeeping.sweeps.limits.pace import Pace
from housekeeping.sweeps.limits.throttle import Throttle
from housekeeping.sweeps.stages.stage import BatchResult

#: Seconds after which a wait between batches looks at pauses, the lease and the heartbeat.
_LONGEST_WAIT_S: Final = 1.0


class RunWatch:
    """Watches whether a run may continue, and sends its heartbeats.

    Parameters:
      tables: The tables whose locks and vacuum throttle the run.

    Attributes:
      pace: Pauses of the run between its batches.
      throttle: Throttle of the run.
      row_limit: The breaker's limit for the run.
      budget: The run's time.
    """

    def __init__(
        self,
        request: RunRequest,
        progress: RunProgress,
        run_id: int,
        *,
        tables: Sequence[str],
        budget: RunBudget,
        lease: RunLease,
        row_limit: RowLimit,
        sizer: BatchSizer,
        one_round_trip: OneRoundTrip,
    ) -> None:
        sweep = request.sweep
        self.pace = Pace(sweep.max_rows_per_s, sweep.rest, progress.clock, sweep.progress_counts, sweep.shards)
        self.throttle = Throttle(sweep.throttle, tables, budget, request.stopping.wait, request.health)
        self.row_limit = row_limit
        self.budget = budget
        self._request = request
        self._run_id = run_id
        self._lease = lease
        self._sizer = sizer
        self._one_round_trip = one_round_trip
        self._heartbeat_at = time.monotonic()

    def check_lease(self) -> None:
        """Raise LeaseLost unless the lease is still held."""
        self._lease.check()

    def check(self) -> None:
        """Raise unless the run's ledger row is still open.

        The lease alone is not proof: its clock stops while a machine sleeps.
        """
        self._lease.check()
        runs.check(self._run_id)

    def stopped(self) -> Verdict | None:
        """Return the verdict of a run that a shutdown or a pause ends; None if it continues."""
        if self._request.stopping.is_set():
            return SHUTDOWN
        return PAUSED if self._sizer.is_paused else None

    def verdict(self, state: RunState, result: BatchResult) -> Verdict | None:
        """Return the verdict of a run that ends after this batch; None: it continues."""
        if result.stop is not None:
            return "partial", result.stop
        if state.verdict is not None:
            return state.verdict
        if (reached := self.row_limit.reached(state.counts)) is not None:
            return reached
        if self._request.stopping.is_set():
            return SHUTDOWN
        return OUT_OF_TIME if self.budget.exceeded() else None

    def rows_left(self, counts: Counts) -> int | None:
        """Return the most rows that breaker and pace allow in the next batch; None: any number."""
        limits = (self.row_limit.left(counts), self.pace.batch_limit)
        return min((each for each in limits if each is not None), default=None)

    def must_stop(self) -> bool:
        """Return whether the run ends at once; send a heartbeat if one is due."""
        self._lease.check()
        if time.monotonic() - self._heartbeat_at > runs.HEARTBEAT.total_seconds():
            with database.atomic():
                self._sizer.apply(runs.beat(self._run_id))
            self._one_round_trip.heartbeat_at = None
            self._heartbeat_at = time.monotonic()
        return self.stopped() is not None

    def time_is_up(self) -> bool:
        """Return whether the run must end, so that a stage starts no further effect outside. Sends due heartbeats."""
        return self.must_stop() or self.budget.exceeded()

    def wait(self, *, is_first: bool) -> Verdict | None:
        """Wait until the next batch may begin. Return the verdict if the run ends here; None if it continues.

        A run always processes its first batch, so that a throttle cannot stop the work altogether.
        """
        if (verdict := self._wait_for_pace()) is not None:
            return verdict
        if self.throttle.hold(self.time_is_up) is None:
            return None
        return self.stopped() or (None if is_first else THROTTLED)

    def _wait_for_pace(self) -> Verdict | None:
        left_s = self.pace.left_s()
        if left_s > 0 and left_s > self.budget.left():
            return OUT_OF_TIME  # without waiting for it
        while left_s > 0:
            wait_s = min(left_s, _LONGEST_WAIT_S)
            self._request.stopping.wait(wait_s)
            if left_s >= _LONGEST_WAIT_S:
                self._read_override()
            if self.must_stop():
                return self.stopped()
            # A clock that is set, as in tests, may stand still.
            left_s = min(left_s - wait_s, self.pace.left_s())
        return None

    def _read_override(self) -> None:
        """Read the worker's override between two batches, so that a pause ends a long wait."""
        try:
            self._sizer.apply(override_of(self._request.sweep.name))
        except PeeweeException as error:
            if not is_connection_lost(error):  # the next batch connects again
                raise
