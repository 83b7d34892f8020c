"""End of a run: its outcome, and the row of the ledger that records it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from dramatiq.middleware import Shutdown
from peewee import PeeweeException

from housekeeping.core.errors import LeaseLost, RunTakenOver, SchemaMissing
from housekeeping.core.sanitize import error_line, mask_secrets, printable, shortened
from housekeeping.core.telemetry.error_reporting import report
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.thread_interrupt import LostLease
from housekeeping.database.errors import is_unreachable
from housekeeping.sweeps.engine.counts import CLOCK_SKEW, initial_counts
from housekeeping.sweeps.engine.failures.error_mapping import classify_error, reason_of
from housekeeping.sweeps.engine.run_context import RunProgress, RunRequest
from housekeeping.sweeps.ledger import run_queries, run_start, runs
from housekeeping.sweeps.ledger.runs import Counts, Outcome
from housekeeping.sweeps.limits.breaker import processed_rows
from housekeeping.sweeps.limits.first_run import UNCONFIRMED

logger = named_logger(__name__)

#: Counts that a run without a committed batch adds to its row.
_COUNTS_OF_A_BROKEN_RUN: Final = ("failed", "breaker", UNCONFIRMED, CLOCK_SKEW)

_FRAMES: Final = 30  # of a traceback, the innermost ones
_LONGEST_TRACEBACK: Final = 10_000  # characters
_MASKED: Final = 10 * _LONGEST_TRACEBACK  # characters of a huge error text that are searched for passwords


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended.

    Attributes:
      error: The exception that ended the run, or for which its message is retried.
      retry_after: Delay after which the message is to be delivered again.
      is_recorded: Whether the ledger already has this end, or needs no row for it.
    """

    outcome: Outcome
    reason: str | None = None
    error: BaseException | None = None
    retry_after: timedelta | None = None
    is_recorded: bool = False


def end_of_error(error: BaseException) -> RunEnd:
    """Return the end of a run that raised this error."""
    if isinstance(error, RunTakenOver):
        return RunEnd("lost_lease", "taken_over", error)
    if isinstance(error, LeaseLost | LostLease):
        return RunEnd("lost_lease", "lease_lost", error)
    if isinstance(error, Shutdown):
        return RunEnd("partial", "shutdown", error)
    return RunEnd("failed", reason_of(error), error)


def record_end(request: RunRequest, progress: RunProgress, end: RunEnd) -> RunEnd:
    """Record the end in the ledger, and return the end that the ledger has.

    If the database cannot be reached, the row stays open and the next run closes it as ``lost``.
    """
    if end.is_recorded:
        return end
    recorded = (
        _record_without_row(request, progress, end) if progress.run_id is None else _close_row(request, progress, end)
    )
    if end.reason in ("breaker", UNCONFIRMED):
        return replace(recorded, error=progress.preflight.error or recorded.error)
    if end.outcome != "failed" or not isinstance(end.error, Exception) or recorded.error is None:
        return recorded
    error = classify_error(end.error)
    reason = str(error) if isinstance(error, SchemaMissing) else end.reason
    report(error, worker=request.sweep.name, run_id=progress.run_id, message_id=request.message_id)
    return RunEnd("failed", reason, error)


def _record_without_row(request: RunRequest, progress: RunProgress, end: RunEnd) -> RunEnd:
    if end.error is not None and is_unreachable(end.error):
        return end
    try:
        row = run_start.record(
            request.sweep.name,
            end.outcome,
            end.reason or "",
            message_id=request.message_id,
            tick=request.tick,
            trigger=request.trigger,
            counts={**progress.preflight.counts, **request.noted},
            traceback=stored_traceback(end.error),
        )
    except PeeweeException as error:
        logger.error("Could not record the run", outcome=end.outcome, error=error_line(error))
        if end.error is None and request.tick is not None:
            return RunEnd("failed", reason_of(error), error)  # every tick has an outcome, so it is retried
        return end
    progress.recorded(request, *row)
    return end


def _close_row(request: RunRequest, progress: RunProgress, end: RunEnd) -> RunEnd:
    """Close the run's row and return its end, which differs if the last batch or another run has closed it."""
    assert progress.run_id is not None
    error = end.error
    # A shutdown is no error.
    text = None if error is None or isinstance(error, Shutdown) else error_line(error)
    extra: Counts = {name: progress.counts[name] for name in _COUNTS_OF_A_BROKEN_RUN if name in progress.counts}
    try:
        closed = runs.fail(progress.run_id, end.outcome, end.reason or "", text, extra, stored_traceback(error))
    except PeeweeException as again:
        logger.error("Could not close the run", outcome=end.outcome, error=error_line(again))
        return end
    progress.counts = {**initial_counts(request.sweep), **closed.counts}
    if closed.outcome in ("done", "partial") and closed.outcome != end.outcome:
        # The last batch was committed. Only the answer to its COMMIT was lost, or the lease after it.
        logger.warning("Run had completed before its error", error=text)
        return RunEnd(closed.outcome, closed.reason)
    if end.outcome == "lost_lease" and closed.outcome == "lost":
        return replace(end, reason="taken_over", error=RunTakenOver(f"run {progress.run_id} has been taken over"))
    return replace(end, error=LeaseLost(str(error)) if isinstance(error, LostLease) else error)


def stored_traceback(error: BaseException | None) -> str | None:
    """Return the traceback for the ledger, with passwords masked and the middle of a long one left out.

    None without an error, and for a shutdown.
    """
    if error is None or isinstance(error, Shutdown):
        return None
    text = "".join(traceback.format_exception(error, limit=-_FRAMES))
    # Shortened twice: the first cut may go through a password, and the second one removes what is around that cut.
    return shortened(printable(mask_secrets(shortened(text, _MASKED))), _LONGEST_TRACEBACK)


def close_rejections(request: RunRequest, progress: RunProgress, end: RunEnd) -> None:
    """Log, record and report the rejected rows, however the run ended."""
    if progress.rejections is None:
        return
    complete = progress.saw_everything and end.outcome == "done"
    at_limit = (end.outcome, end.reason) == ("partial", "limit")
    progress.rejections.close(
        complete=complete,
        delayed=(complete or at_limit) and not processed_rows(progress.counts, request.sweep.progress_counts),
        rejected_before=progress.rejected_before,
        position=progress.position,
    )


def remember_predicate(request: RunRequest, progress: RunProgress, end: RunEnd) -> None:
    """Write the predicate's fingerprint, so that the next run notices a changed predicate; never raises."""
    completed = end.outcome == "done" or (end.outcome == "partial" and end.reason != "shutdown")
    if progress.predicate is None or progress.run_id is None or not (completed or request.confirmed):
        return
    try:
        run_queries.remember_predicate(progress.run_id, progress.predicate)
    except PeeweeException as error:
        logger.warning("Could not write the predicate's fingerprint", error=error_line(error))
