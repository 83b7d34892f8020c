"""Circuit breaker for a run that finds far more stale rows than usual: it alerts, limits the run or stops it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, Protocol, get_args

from housekeeping.core.errors import DeclarationError
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.sweeps.checks.field_types import refuse_wrong_types
from housekeeping.sweeps.ledger.runs import Counts, Outcome, PastRun
from housekeeping.sweeps.limits.bounded_counts import CountFailed, count_stale, estimated_rows
from housekeeping.sweeps.limits.db_health import table_name
from housekeeping.sweeps.stages.stage import Backlog, Stage
from housekeeping.sweeps.stages.table_stage import TableStage

logger = named_logger(__name__)

Action = Literal["alert", "limit", "stop"]

#: With fewer runs nobody can say what is usual.
ENOUGH: Final = 10
#: Rows that never exceed the breaker by history: a worker that processed three a day may process a few thousand after
#: a holiday.
FLOOR: Final = 10_000
#: Options that bound what one run processes, however much is stale.
_AT_MOST: Final = ("max_deletes", "max_projects")


@dataclass(frozen=True, slots=True)
class Breaker:
    """How much is too much for one run, and what happens then.

    Attributes:
      times_history: Allowed is this many times the most that any of the last runs processed, and at least 10,000 rows;
        from ten past runs on. None: no such limit.
      share: Allowed is this share of the sweep's tables, by PostgreSQL's statistics: 0.5 is half; from the first run
        on. None: no such limit.
      action: ``alert``: the run goes on, and an alert says so. ``limit``: the run processes the allowed number of rows,
        ends as ``partial: breaker`` and alerts; the next run goes on. ``stop``: the run ends as ``failed: breaker``
        before the first change.

    Raises:
      DeclarationError: When there is no such action.
    """

    times_history: float | None = 100
    share: float | None = None
    action: Action = "alert"

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise DeclarationError(f"a breaker's action is {self.action!r}; it should be alert, limit or stop")
        refuse_wrong_types("Breaker", self)


class Breakable(Protocol):
    """A sweep, as far as its breaker needs it."""

    @property
    def name(self) -> str: ...

    @property
    def breaker(self) -> Breaker: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def max_runtime(self) -> timedelta: ...

    @property
    def shards(self) -> int: ...

    @property
    def progress_counts(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class RowLimit:
    """The most rows a run may process.

    Attributes:
      rows: That number; None: any.
      expected: How many were stale before the run; None: more than that, or unknown.
      progress_counts: The counts that are processed rows.
      exceeded: The count ``breaker`` of a run that reaches the limit with rows left.
    """

    rows: int | None = None
    expected: int | None = None
    progress_counts: Sequence[str] = ()
    exceeded: Counts = field(default_factory=dict)

    def left(self, counts: Counts) -> int | None:
        """Return how many rows the next batch may have; None: any number."""
        return None if self.rows is None else max(1, self.rows - settled_by(counts, self.progress_counts))

    def reached(self, counts: Counts) -> tuple[Outcome, str | None] | None:
        """Return how a run with these counts ends here; None: it may go on."""
        rows = settled_by(counts, self.progress_counts)
        if self.rows is None or rows < self.rows:
            return None
        return ("done", None) if rows == self.expected else ("partial", "breaker")

    def noted(self, counts: Counts, reason: str | None) -> Counts:
        """Return the counts at the end of a run, with the count ``breaker`` where that ended it."""
        return counts | {"breaker": self.exceeded} if reason == "breaker" else counts


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the breaker says of a run before its first change.

    Attributes:
      worker: The worker, with its argument, as the command line takes it.
      action: What a run does that exceeds the breaker.
      allowed: The most rows one run should process.
      usual: The most that any run of the history processed.
      runs: How many runs the history has.
      stale: The stale rows, counted up to `allowed`; None: they could not be counted.
      shards: How many runs share the work.
      progress_counts: The counts that are processed rows.
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
        """Whether more is stale than allowed, as far as could be counted."""
        return self.stale is None or not self.stale.exact or self.stale.rows > self.allowed

    @property
    def row_limit(self) -> RowLimit:
        """The limit of the run itself; of a breaker that does not limit runs, any number of rows."""
        if self.action != "limit":
            return RowLimit()
        if self.exceeded:
            return RowLimit(max(1, self.allowed // self.shards), None, self.progress_counts, self.as_count())
        assert self.stale is not None
        # Rows may become stale while the run is at work.
        later = dataclasses.replace(self, stale=Backlog(self.allowed, exact=False))
        return RowLimit(self.allowed, self.stale.rows, self.progress_counts, later.as_count())

    @property
    def refusal(self) -> str:
        """The error of a run that the breaker stops: the numbers, and how to go on."""
        return (
            f"{in_numbers(self.as_count())}; nothing was changed. Look at: housekeeping plan {self.worker}; "
            f"to go on: housekeeping run {self.worker} --confirm"
        )

    def as_count(self) -> Counts:
        """The count ``breaker`` of a run that exceeds it, as the ledger keeps it."""
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
    """The count ``breaker`` of a run, in words."""
    stale, allowed = count["stale"], f"{count['allowed']:,}"
    if stale is None:
        found = "the stale rows could not be counted"
    else:
        found = f"{stale:,} rows are stale" if count["exact"] else f"more than {stale:,} rows are stale"
    runs = count["runs"]
    usual = f"the last {runs} runs processed {count['usual']:,} at most" if runs else "no run before it has ended"
    return f"{found}; {usual}, the breaker allows {allowed}"


def check(
    sweep: Breakable,
    history: Sequence[int],
    passes: Sequence[Stage],
    now: datetime,
    argument: Any = None,
) -> Verdict | None:
    """Compare what is stale with what is usual; None when there is nothing to compare with.

    Counts no further than the limit. A count that fails or takes too long is a verdict, too (`Verdict.stale`).

    Parameters:
      history: The rows each of the last runs processed; with fewer than ten, `times_history` does not apply.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    allowed = _allowed(sweep.breaker, history, passes)
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
        stale=_count(sweep, passes, now, allowed, argument),
        shards=sweep.shards,
        progress_counts=sweep.progress_counts,
    )


def usual_rows(history: Sequence[PastRun], progress_counts: Sequence[str]) -> list[int]:
    """Return the rows that each past run processed, as far as they tell what is usual.

    A run that exceeded its breaker counts as what was usual before it: a flood must not become usual while it lasts.
    Ten of them that ended as ``done`` are the worker's new load, and count as they are.
    """
    if not progress_counts:
        return []
    exceeded = [past for past in history if is_exceeded(past.counts)]
    grown = sum(past.outcome == "done" for past in exceeded) >= ENOUGH
    return [
        int(past.counts["breaker"]["usual"])
        if is_exceeded(past.counts) and not (grown and past.outcome == "done")
        else settled_by(past.counts, progress_counts)
        for past in history
    ]


def is_exceeded(counts: Mapping[str, Any]) -> bool:
    """Whether the counts are those of a run that exceeded its breaker."""
    return isinstance(counts.get("breaker"), dict)


def settled_by(counts: Counts, progress_counts: Sequence[str]) -> int:
    """How many records a run took from what was stale, by its counts."""
    return sum(int(counts.get(name) or 0) for name in progress_counts)


def _allowed(breaker: Breaker, history: Sequence[int], passes: Sequence[Stage]) -> int | None:
    limits = []
    if breaker.times_history is not None and len(history) >= ENOUGH:
        limits.append(max(FLOOR, int(breaker.times_history * max(history))))
    if breaker.share is not None:
        tables = sorted({table_name(each.model) for each in passes if isinstance(each, TableStage)})
        rows = estimated_rows(tables)
        limits += [] if rows is None else [int(breaker.share * rows)]
    return min(limits, default=None)


def _count(sweep: Breakable, passes: Sequence[Stage], now: datetime, limit: int, argument: Any) -> Backlog | None:
    try:
        return count_stale(passes, now, limit, argument, sweep.max_runtime)
    except CountFailed as error:
        logger.warning("Breaker could not count the stale rows", error=str(error))
        return None
