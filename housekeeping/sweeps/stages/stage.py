"""What a run walks through: one pass or several, each step of which is one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from blinker import NamedSignal

#: Where a walk has got to, for the pass that made it: values JSON can hold, or that `as_cursor` makes so.
Position = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, not yet taken.

    Attributes:
      worker, run_id: Whose it is.
      now: The time the run began; staleness is measured against it.
      after: Where the step before ended; None: the front.
      until: The last position of the stage, which a resumed run has begun after; None: to the end.
      argument: What the run is about, for a worker that takes an argument.
      time_is_up: Whether a step that consists of many outside effects should end early.
      only: Just these positions, for finding the one that cannot be settled.
      check: To be called right before an effect outside that cannot be taken back; one look at the ledger. Raises
        `LeaseLost` or `RunTakenOver` where another run may have begun because this one was taken for dead.
      most: The rows that the breaker still allows, for a pass whose batches are not exactly of their size; None: any
        number.
    """

    worker: str
    run_id: int | None
    now: datetime
    after: Position | None = None
    until: Position | None = None
    argument: Any = None
    time_is_up: Callable[[], bool] = lambda: False
    only: Sequence[Position] | None = None
    check: Callable[[], None] = lambda: None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A record that could not be settled; the others were.

    Attributes:
      rows: How many records it stands for, where they are not known one by one.
    """

    record: dict[str, Any]
    error: BaseException
    rows: int = 1


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one step did, true once its transaction has committed.

    Attributes:
      counts: What to add to the run's counts; a value that is no number replaces.
      position: Where the walk has got to.
      exhausted: Whether nothing is left after it.
      stop: Why the run ends here although something may be left: ``limit``; null otherwise.
      rows: The records that were changed, for events and log lines; none where nobody is told of them.
      failures: Records to be logged, reported and counted as ``failed``.
      rescued: Records that were settled another way after an error; reported.
      unreachable: What keeps part of the records from being settled; the run goes on, and ends as failed with it.
    """

    counts: dict[str, Any] = field(default_factory=dict)
    position: Position | None = None
    exhausted: bool = True
    stop: str | None = None
    rows: Sequence[dict[str, Any]] = ()
    failures: Sequence[Failure] = ()
    rescued: Sequence[Failure] = ()
    unreachable: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Announcement:
    """Rows of an event that a batch announces.

    Attributes:
      in_outbox: Whether the stage has stored them in the outbox itself, before an effect that cannot be rolled back.
    """

    event: NamedSignal
    rows: Sequence[dict[str, Any]]
    in_outbox: bool = False


@dataclass(frozen=True, slots=True)
class Backlog:
    """How much is stale.

    Attributes:
      rows: The number, or as far as was counted.
      exact: Whether `rows` is all of them.
    """

    rows: int
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.rows:,}" if self.exact else f"at least {self.rows:,}"

    def __add__(self, other: Backlog) -> Backlog:
        return Backlog(self.rows + other.rows, self.exact and other.exact)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a pass would do now.

    Attributes:
      stale: How many records it would settle.
      counts: The run's counts as they would be, from this pass.
      oldest, newest: What the first and the last in order are known by; null when there are none.
      samples: The first few.
    """

    name: str
    stale: Backlog
    counts: dict[str, int]
    oldest: Any = None
    newest: Any = None
    samples: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """Result of a `Preflight`.

    Attributes:
      counts: Counts of the run, by name.
      error: What the run fails with once its own work is done, so that its message is retried; None: nothing failed.
    """

    counts: dict[str, int] = field(default_factory=dict)
    error: Exception | None = None


class Preflight(Protocol):
    """Work that must not depend on the lease, the breaker, the throttles or the ledger of its run.

    A run does it after it has checked that its worker is not paused or disabled. Every attempt at the run's message
    does it again, so it must be repeatable.
    """

    def carry_out(self) -> PreflightResult:
        """Do the work."""

    def plan(self) -> StagePlan:
        """Return what `carry_out` would do now, and change nothing."""


class Stage(Protocol):
    """One walk through what is stale. The engine owns the loop, the transaction, the counts and the position."""

    @property
    def name(self) -> str:
        """Its name within the sweep; the cursor in the ledger names it."""

    @property
    def batch_size(self) -> int:
        """Records a step, at the most."""

    def prepare(self, batch: Batch) -> Any:
        """Look, and have effects outside of the database, outside of any transaction; repeatable.

        Returns what `settle` needs to know.
        """

    def apply(self, batch: Batch, prepared: Any) -> BatchResult:
        """Change the database, within the batch's transaction; nothing outside of it."""

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        """Write the log lines of what was done, after the commit."""

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        """How many records are stale, looking at no more than `limit` and one."""

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        """What the first stale record in order is known by, usually its time; null when there is none."""

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        """What it would do now, changing nothing."""


@runtime_checkable
class Announcing(Protocol):
    """A stage whose batches have events."""

    def announcements(self, result: BatchResult) -> Sequence[Announcement]:
        """Return the events of a batch; called within its transaction, once it is settled."""


@runtime_checkable
class Divisible(Stage, Protocol):
    """A stage whose batch can be bisected, to find the records that make it fail.

    Its `settle` is given parts of the batch as `batch.only`, with all that was taken.
    """

    def positions(self, batch: Batch, prepared: Any) -> list[Position]:
        """Return the records of the batch, one by one."""

    def after_all(self, batch: Batch, prepared: Any, positions: Sequence[Position]) -> BatchResult:
        """Return where the stage stands once these records are dealt with; it counts nothing."""

    def fallback(self, batch: Batch, error: BaseException) -> BatchResult | None:
        """Settle the single record of `batch.only` another way, in a transaction of its own; None: there is none."""

    def describe(self, position: Position) -> dict[str, Any]:
        """The record, for the log and the error tracker."""


@runtime_checkable
class Resizable(Protocol):
    """A pass whose steps can be made smaller while a run is at work; so can a dataclass's that has a `batch_size`."""

    def resized(self, batch_size: int) -> Stage:
        """The same pass, at the same place, with steps of so many records at the most."""


@dataclass(frozen=True, slots=True)
class ExplainQuery:
    """A statement that walks a table and must do so by an index.

    Attributes:
      what: What it looks for, in a few words.
      query: As the run sends it.
      model: The table.
    """

    what: str
    query: Any
    model: Any


@runtime_checkable
class Explainable(Protocol):
    """A pass that can say which statements it walks tables by, for `housekeeping doctor` to explain."""

    def explain_queries(self, now: datetime) -> Sequence[ExplainQuery]:
        """The statements of a run that begins now."""


def as_cursor(position: Position | None) -> list[Any] | None:
    """A position in a form JSON can hold and PostgreSQL reads back as it was."""
    if position is None:
        return None
    return [_plain(value) for value in position]


def _plain(value: Any) -> Any:
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, bytes | memoryview):
        return value.hex()
    return value.isoformat() if isinstance(value, datetime) else str(value)
