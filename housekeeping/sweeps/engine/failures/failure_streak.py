"""Detection of an error that keeps every row of a stage from changing."""

from __future__ import annotations

from typing import Final

from housekeeping.core.sanitize import error_line
from housekeeping.sweeps.stages.causes import cause_of
from housekeeping.sweeps.stages.stage import BatchResult

#: After this many consecutive rows with the same error, the rows are not the cause.
MOST_FAILURES: Final = 20


class FailureStreak:
    """Counts consecutive rows that fail with the same error.

    Attributes:
      error: Text of the error once the streak is too long; None before.
    """

    def __init__(self) -> None:
        self.error: str | None = None
        self._cause = ""
        self._rows = 0

    def add(self, result: BatchResult) -> None:
        """Add the failed rows of a batch. A batch with a changed row resets the streak."""
        if any(result.counts.values()):
            self._rows = 0
            return
        for failure in result.failures:
            cause = cause_of(failure.error, failure.record)
            self._rows = self._rows + 1 if cause == self._cause else 1
            self._cause = cause
            if self._rows >= MOST_FAILURES:
                self.error = error_line(failure.error)

    def reset(self) -> None:
        """Reset the streak for the next stage."""
        self.error = None
        self._rows = 0
