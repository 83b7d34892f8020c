"""Execution of sweeps. Start with `run` (a run from top to bottom), then `batches` (its loop) and `commit`.

| Chapter | Answers |
|---|---|
| `run` | what happens in which order, and what the ledger, the log and the metrics say about it |
| `gates`, `guard` | what keeps a run from its first change, and how many stale rows are too many |
| `batches`, `commit` | how batch follows batch, and how one of them becomes final |
| `failures` | which rows are at fault, and what is recorded about them |
| `speed` | how large the next batch is, and how long it waits |
| `alerts` | what needs a person, as log line, metric and in the status |
| `restore`, `purge` | runs that no module declares |
| `registry` | which sweeps there are, and the actors that run them |

Here are the records of a run: `RunRequest`, `RunState` and `RunResult`. `RunRecord` in `ledger.history` is the fourth,
a run as the ledger has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from housekeeping.core.clock import DATABASE, REDIS, SYSTEM_CLOCK, Clock, ServerClock
from housekeeping.core.errors import BreakerTripped, DeclarationError, HousekeepingError, RunTakenOver
from housekeeping.core.logs import in_one_line
from housekeeping.ledger.runs import Counts, Outcome, Resume, Trigger
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stage import DETAILS, BatchResult, Position, merged

if TYPE_CHECKING:
    from housekeeping.engine.failures import Rejections

#: How a run ends: outcome and reason.
Verdict = tuple[Outcome, str | None]
DONE: Final[Verdict] = ("done", None)
PAUSED: Final[Verdict] = ("partial", "paused")
SHUTDOWN: Final[Verdict] = ("partial", "shutdown")
STOPPED: Final[Verdict] = ("partial", "stopped")
OUT_OF_TIME: Final[Verdict] = ("partial", "out_of_time")
THROTTLED: Final[Verdict] = ("partial", "gate")

#: Server -> count: the seconds by which this machine's clock was ahead of the server's, if that exceeded the tolerance.
CLOCK_SKEWS: Final = {DATABASE: "clock_skew_s", REDIS: "redis_clock_skew_s"}
#: Flags among the counts that say whether time ran out. The documents have two names for it.
_DOCUMENT_100: Final = "execution_timeout"
_TIME_FLAGS: Final = ("out_of_time", _DOCUMENT_100)

_LONGEST_SUBJECT: Final = 200  # characters of a run's argument


def initial_counts(sweep: Sweep) -> Counts:
    """Return all counts of the sweep at zero, in the order in which they are shown."""
    return {name: False if name in _TIME_FLAGS else 0 for name in sweep.counts}


def in_order(sweep: Sweep, counts: Counts) -> Counts:
    """Return the counts in the sweep's order, which jsonb does not keep."""
    names = dict.fromkeys((*sweep.counts, *counts))
    return {name: counts[name] for name in names if name in counts}


def added(before: Counts, result: BatchResult) -> Counts:
    """Return the counts with those of a batch added.

    Raises:
      DeclarationError: The batch has a count that the sweep does not declare.
    """
    for name in result.counts:
        if name not in before and name != DETAILS:
            declared = ", ".join(before) or "none"
            raise DeclarationError(f"{name!r} is counted, but not among the sweep's counts ({declared}); add it there")
    counts = merged(before, result.counts)
    if "batches" in counts:
        counts["batches"] += any(result.counts.values())  # only a batch that changed something counts
    if result.failures:
        counts["failed"] = counts.get("failed", 0) + len(result.failures)
    return counts


def flagged(counts: Counts, verdict: Verdict, exceeded: Callable[[], bool]) -> Counts:
    """Return the counts at the end of a run, with the flags that say whether its time ran out.

    Parameters:
      exceeded: Returns whether the run's time is over, which sets `execution_timeout` even if nothing is left
        (document 100, 処理フロー 4).
    """
    flags = {flag: verdict == OUT_OF_TIME for flag in _TIME_FLAGS if flag in counts}
    if _DOCUMENT_100 in flags:
        flags[_DOCUMENT_100] = flags[_DOCUMENT_100] or exceeded()
    return counts | flags


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What a run is asked to do; the parameters of `run_sweep` and the message it runs for.

    Attributes:
      stopping: Ends the run after the current batch once it is set.
      max_rows: The most rows that the run may process; None for any number.
      resumes: The run whose cursor this one takes over, whatever its outcome; None leaves that to `resume`.
      noted: What the run was asked to do, written into its counts for a later run to read.
    """

    sweep: Sweep
    argument: Any = None
    message_id: str | None = None
    tick: datetime | None = None
    trigger: Trigger = "cli"
    stopping: threading.Event = field(default_factory=threading.Event)
    force: bool = False
    confirmed: bool = False
    max_rows: int | None = None
    resumes: int | None = None
    noted: Counts = field(default_factory=dict)
    clock: Clock | None = None
    on_batch: Callable[[Counts], None] | None = None
    on_begin: Callable[[int], None] | None = None

    @property
    def subject(self) -> str:
        """The argument as the ledger stores it; empty without one."""
        return "" if self.argument is None else in_one_line(str(self.argument), _LONGEST_SUBJECT)

    @property
    def resume(self) -> Resume:
        """Which earlier runs this one resumes."""
        # The cursor of a run with another argument says nothing about this one.
        if self.sweep.argument is not None or self.sweep.limits.resume == "never":
            return "never"
        return "cut_short" if self.sweep.limits.resume == "after_limit" else "interrupted"


@dataclass(slots=True)
class RunState:
    """What a run has done so far, and how it ends. It stays readable when an exception ends the run.

    Attributes:
      clock: The given clock. Without one, the database's clock as soon as it is known.
      counts: The counts that are committed.
      run_id: The run's row in the ledger; None before it is written.
      position: Where the last committed batch ended.
      fingerprint: Fingerprint of the predicate, to be written once the run has completed; None if it is known.
      rejections: The rows that the run rejected; None before it has a row in the ledger.
      rejected_before: Whether an earlier run has left rejected rows.
      saw_everything: Whether the run has looked at every stale row.
      outcome, reason: How it ends; None while it is at work.
      error: The exception that ended the run, or for which its message is retried.
      retry_after: Delay after which the message is to be delivered again.
      is_recorded: Whether the ledger already has this end, or needs no row for it.
      nothing_left: Whether the last batch has found a backlog of 0 and recorded it.
    """

    clock: Clock
    started_at: datetime
    counts: Counts
    run_id: int | None = None
    position: Position | None = None
    fingerprint: str | None = None
    rejections: Rejections | None = None
    rejected_before: bool = False
    saw_everything: bool = False
    outcome: Outcome | None = None
    reason: str | None = None
    error: BaseException | None = None
    retry_after: timedelta | None = None
    is_recorded: bool = False
    nothing_left: bool = False

    @classmethod
    def of(cls, request: RunRequest) -> RunState:
        """Return the state of a run that has not begun."""
        clock = request.clock or SYSTEM_CLOCK
        return cls(clock, clock.now(), {**initial_counts(request.sweep), **request.noted})

    def recorded(self, request: RunRequest, run_id: int, started_at: datetime) -> None:
        """Store id and start of the run's row, and from now on use the database's clock if the request has none."""
        self.run_id, self.started_at = run_id, started_at
        if request.clock is None:
            self.clock = ServerClock(started_at)

    def end(
        self,
        outcome: Outcome,
        reason: str | None = None,
        error: BaseException | None = None,
        *,
        retry_after: timedelta | None = None,
        is_recorded: bool = False,
    ) -> None:
        """Set how the run ends."""
        self.outcome, self.reason, self.error = outcome, reason, error
        self.retry_after, self.is_recorded = retry_after, is_recorded


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of one run, as its row in the ledger has it.

    Attributes:
      run_id: Id of its row; None for a dry run, or if the database could not be reached.
      reason: Reason of the outcome; None for a plain ``done``.
      duration_s: Seconds, by the monotonic clock.
      error: The exception that ended it; not part of the JSON form.
      retry_after: Delay until the message is delivered again, if its own dead attempt holds the lease. Not part of
        the JSON form.
      is_deferred: Whether the run failed for a reason of its argument, whose next run is deferred. Not part of the
        JSON form.
      nothing_left: Whether its row has a backlog of 0 already. Not part of the JSON form.
    """

    worker: str
    outcome: Outcome
    reason: str | None
    run_id: int | None
    started_at: datetime
    duration_s: float
    counts: Counts
    dry_run: bool = False
    error: BaseException | None = field(default=None, compare=False)
    retry_after: timedelta | None = field(default=None, compare=False)
    is_deferred: bool = field(default=False, compare=False)
    nothing_left: bool = field(default=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return the result object of ``housekeeping run --json``."""
        return {
            "worker": self.worker,
            "outcome": self.outcome,
            "reason": self.reason,
            "run_id": self.run_id,
            "started_at": self.started_at.isoformat(),
            "duration_s": round(self.duration_s, 3),
            "counts": self.counts,
            "dry_run": self.dry_run,
        }

    @property
    def finished_at(self) -> datetime:
        """When it ended."""
        return self.started_at + timedelta(seconds=self.duration_s)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 for done, partial and skipped, 1 for failed and lost_lease."""
        return 0 if self.outcome in ("done", "partial", "skipped") else 1

    def raise_for_failure(self) -> None:
        """Raise the error that ended the run, so that its message is retried.

        A run that was taken over raises nothing: its actor requeues the message. Nor does a run that its breaker
        stopped: retries would be stopped as well until an operator confirms a run.
        """
        if self.error is None or isinstance(self.error, RunTakenOver | BreakerTripped):
            return
        if isinstance(self.error, Exception | KeyboardInterrupt):
            raise self.error
        raise HousekeepingError(f"{self.worker}: {self.reason}") from self.error
