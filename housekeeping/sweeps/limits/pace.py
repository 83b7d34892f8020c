"""Pace: the pauses between the batches of one run."""

from __future__ import annotations

from collections.abc import Sequence

from housekeeping.core.clock import Clock
from housekeeping.sweeps.ledger.runs import Counts
from housekeeping.sweeps.limits.breaker import processed_rows


class Pace:
    """Computes how long a run waits before its next batch.

    Parameters:
      max_rows_per_s: Most rows per second; None for no limit.
      rest: Pause after a batch, as a multiple of its duration.
      progress_counts: Names of the counts whose sum is the number of processed rows. Empty: all but ``batches``.
      shards: Number of runs that share the rows per second.

    Attributes:
      batch_limit: Most rows of a batch: those of one second, so that the load is even; None for no limit.
    """

    def __init__(
        self,
        max_rows_per_s: float | None,
        rest: float,
        clock: Clock,
        progress_counts: Sequence[str],
        shards: int = 1,
    ) -> None:
        self._rows_per_s = None if max_rows_per_s is None else max_rows_per_s / shards
        self._rest = rest
        self._is_limited = max_rows_per_s is not None or rest > 0
        self._clock = clock
        self._progress_counts = progress_counts
        self._began = 0.0
        self._next_at: float | None = None
        self.batch_limit = None if self._rows_per_s is None else max(1, int(self._rows_per_s))

    def begin(self) -> None:
        """Record the start of a batch."""
        if self._is_limited:
            self._began = self._clock.monotonic()

    def end(self, before: Counts, after: Counts) -> None:
        """Record the end of a batch, with the run's counts before and after it."""
        if not self._is_limited:
            return
        now = self._clock.monotonic()
        took = now - self._began
        pause = self._rest * took
        if self._rows_per_s is not None:
            pause = max(pause, (self._tried(after) - self._tried(before)) / self._rows_per_s - took)
        self._next_at = now + pause

    def left_s(self) -> float:
        """Return the seconds until the next batch may begin; 0 or less: now."""
        return 0.0 if self._next_at is None else self._next_at - self._clock.monotonic()

    def _tried(self, counts: Counts) -> int:
        """Return the rows processed and failed."""
        names = self._progress_counts or [
            name for name, value in counts.items() if name != "batches" and type(value) is int
        ]
        return processed_rows(counts, [*dict.fromkeys((*names, "failed"))])
