"""Circuit breaker for a run that finds far more stale rows than usual: it alerts, limits the run or stops it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.wording import counted
from housekeeping.database.catalog import quoted_name
from housekeeping.sweeps.limits.bounded_counts import CountFailed, count_stale, estimated_rows
from housekeeping.sweeps.limits.declared import Action
from housekeeping.sweeps.limits.declared import Breaker as Breaker
from housekeeping.sweeps.stages.stage import Backlog, Stage
from housekeeping.sweeps.stages.table_stage import TableStage

if TYPE_CHECKING:
    from housekeeping.sweeps.declaration import Sweep
    from housekeeping.sweeps.ledger.run_start import PastRun
    from housekeeping.sweeps.ledger.runs import Counts, Outcome

logger = named_logger(__name__)

#: Minimum number of past runs for a usual number of rows.
ENOUGH: Final = 10
#: Rows that never exceed the breaker by history: a worker that processed three a day may process a few thousand after
#: a holiday.
FLOOR: Final = 10_000
#: Options that bound what one run processes, however much is stale.
_AT_MOST: Final = ("max_deletes", "max_projects")


@dataclass(frozen=True, slots=True)
class RowLimit:
    """The most rows a run may process.

    Attributes:
      rows: The limit; None for no limit.
      expected: Number of stale rows before the run; None if more than the limit, or unknown.
      progress_counts: Names of the counts whose sum is the number of processed rows.
      exceeded: Details that the ledger stores as the count ``breaker`` if the run reaches the limit with rows left.
      reason: The run's reason if it reaches the limit with rows left.
    """

    rows: int | None = None
    expected: int | None = None
    progress_counts: Sequence[str] = ()
    exceeded: Counts = field(default_factory=dict)
    reason: str = "breaker"

    def left(self, counts: Counts) -> int | None:
        """Return how many rows the next batch may have; None for no limit."""
        return None if self.rows is None else max(1, self.rows - processed_rows(counts, self.progress_counts))

    def reached(self, counts: Counts) -> tuple[Outcome, str | None] | None:
        """Return the outcome and reason of a run that has reached the limit; None if it continues."""
        rows = processed_rows(counts, self.progress_counts)
        if self.rows is None or rows < self.rows:
            return None
        return ("done", None) if rows == self.expected else ("partial", self.reason)

    def noted(self, counts: Counts, reason: str | None) -> Counts:
        """Return the counts at the end of a run, with ``breaker`` if the breaker ended it."""
        return counts | {"breaker": self.exceeded} if reason == "breaker" else counts


@dataclass(frozen=True, slots=True)
class Verdict:
    """Comparison of the stale rows with the usual number, before a run's first change.

    Attributes:
      worker: The worker, with its argument, as the command line takes it.
      action: What a run over the limit does.
      allowed: The most rows one run should process.
      usual: The most rows that a past run processed.
      runs: The number of past runs compared.
      stale: The stale rows, counted up to `allowed`; None if they could not be counted.
      shards: The number of runs that share the work.
      progress_counts: Names of the counts whose sum is the number of processed rows.
    """

    worker: str
    action: Action
    allowed: int
    usual: int
    runs: int
    stale: Backlog | None
    shards: int
    progress_counts: Sequence[str]

    @property
    def exceeded(self) -> bool:
        """Whether more rows are stale than allowed, or they could not be counted."""
        return self.stale is None or not self.stale.exact or self.stale.rows > self.allowed

    @property
    def row_limit(self) -> RowLimit:
        """The row limit of the run; no limit unless the action is ``limit``."""
        if self.action != "limit":
            return RowLimit()
        if self.exceeded:
            return RowLimit(max(1, self.allowed // self.shards), None, self.progress_counts, self.as_count())
        assert self.stale is not None
        # More rows may become stale during the run.
        later = dataclasses.replace(self, stale=Backlog(self.allowed, exact=False))
        return RowLimit(self.allowed, self.stale.rows, self.progress_counts, later.as_count())

    @property
    def refusal(self) -> str:
        """The error of a run that the breaker stops, with the commands that let it continue."""
        return (
            f"{in_numbers(self.as_count())}; nothing was changed. Look at: housekeeping plan {self.worker}; "
            f"to continue: housekeeping run {self.worker} --confirm"
        )

    def as_count(self) -> Counts:
        """Return the verdict as the ledger stores it, in the count ``breaker`` of the run."""
        return {
            "action": self.action,
            "stale": None if self.stale is None else self.stale.rows,
            "exact": self.stale is not None and self.stale.exact,
            "allowed": self.allowed,
            "usual": self.usual,
            "runs": self.runs,
        }


def with_argument(worker: str, argument: Any) -> str:
    """Return the worker and its argument as the command line takes them."""
    return worker if argument is None else f"{worker} {argument}"


def in_numbers(count: Mapping[str, Any]) -> str:
    """Describe a stored verdict (the count ``breaker`` of a run) in one line."""
    stale, allowed = count["stale"], f"{count['allowed']:,}"
    if stale is None:
        found = "the stale rows could not be counted"
    else:
        found = f"{'' if count['exact'] else 'more than '}{counted(stale, 'row is', 'rows are')} stale"
    runs = count["runs"]
    last = "run" if runs == 1 else f"{runs} runs"
    usual = f"the last {last} processed {count['usual']:,} at most" if runs else "no run before it has ended"
    return f"{found}; {usual}, the breaker allows {allowed}"


def check(
    sweep: Sweep,
    history: Sequence[int],
    stages: Sequence[Stage],
    now: datetime,
    argument: Any = None,
) -> Verdict | None:
    """Compare the stale rows with the usual number; None when the breaker does not apply.

    Counts no further than the limit. A count that fails or takes too long is `Verdict.stale` None.

    Parameters:
      history: The rows that each past run processed; with fewer than ten, `times_history` does not apply.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    allowed = _allowed(sweep.breaker, history, stages)
    if allowed is None:
        return None
    if any(sweep.options[name] <= allowed for name in _AT_MOST if name in sweep.options):
        return None
    return Verdict(
        worker=with_argument(sweep.name, argument),
        action=sweep.breaker.action,
        allowed=allowed,
        usual=max(history, default=0),
        runs=len(history),
        stale=_count(sweep, stages, now, allowed, argument),
        shards=sweep.shards,
        progress_counts=sweep.progress_counts,
    )


def usual_rows(history: Sequence[PastRun], progress_counts: Sequence[str]) -> list[int]:
    """Return the rows of each past run that count as usual.

    A run over the limit counts with the usual number before it, so that a flood does not become usual while it lasts.
    Ten such runs that ended as ``done`` are a new load and count in full.
    """
    if not progress_counts:
        return []
    exceeded = [past for past in history if is_exceeded(past.counts)]
    grown = sum(past.outcome == "done" for past in exceeded) >= ENOUGH
    return [
        int(past.counts["breaker"]["usual"])
        if is_exceeded(past.counts) and not (grown and past.outcome == "done")
        else processed_rows(past.counts, progress_counts)
        for past in history
    ]


def is_exceeded(counts: Mapping[str, Any]) -> bool:
    """Whether a run with these counts exceeded its breaker."""
    return isinstance(counts.get("breaker"), dict)


def processed_rows(counts: Counts, progress_counts: Sequence[str]) -> int:
    """Return the number of rows a run processed, by its counts."""
    return sum(int(counts.get(name) or 0) for name in progress_counts)


def _allowed(breaker: Breaker, history: Sequence[int], stages: Sequence[Stage]) -> int | None:
    limits = []
    if breaker.times_history is not None and len(history) >= ENOUGH:
        limits.append(max(FLOOR, int(breaker.times_history * max(history))))
    if breaker.share is not None:
        tables = sorted({quoted_name(each.model) for each in stages if isinstance(each, TableStage)})
        rows = estimated_rows(tables)
        limits += [] if rows is None else [int(breaker.share * rows)]
    return min(limits, default=None)


def _count(sweep: Sweep, stages: Sequence[Stage], now: datetime, limit: int, argument: Any) -> Backlog | None:
    try:
        return count_stale(stages, now, limit, argument, sweep.max_runtime)
    except CountFailed as error:
        logger.warning("Breaker could not count the stale rows", error=str(error))
        return None
