"""Protocol of a stage, the values that it exchanges with the engine, and the log lines and events of changed rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Protocol, runtime_checkable

from blinker import NamedSignal

from housekeeping.core.clock import ClockSkew


@dataclass(frozen=True, slots=True)
class RowLog:
    """A log line for each record that was changed.

    Attributes:
      event: Its text.
      fields: Log field -> column of the row.
      constants: Log field -> value.
      level: One of logging's.
    """

    event: str
    fields: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    level: int = logging.INFO


#: Key in a run's counts of numbers by table, and of what else there is to tell about them. It is not a count.
DETAILS: Final = "details"

#: A place in a stage, as the stage made it: values that JSON can hold, or that `as_cursor` converts.
Position = tuple[Any, ...]


class Unrecorded(tuple[Any, ...]):
    """Position that the ledger does not get, because its values identify a person."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch to process.

    Attributes:
      worker, run_id: The run that processes it.
      now: The time at which the run began. Staleness is measured against it.
      after: Where the previous batch ended; None for the front.
      until: The last position, for a resumed run that started again at the front; otherwise None.
      argument: The run's argument.
      time_is_up: Returns whether the batch should end early; to be called between outside effects.
      only: Only these positions, in bisection.
      check: To be called right before an outside effect that cannot be undone. Raises `LeaseLost` or `RunTakenOver` if
        another run may have begun because this one was considered dead. Costs one query.
      most: Rows that the breaker and the pace still allow, for a stage whose batches vary in size; None for any number.
      rejected_until: Where the last run with this argument that rejected rows ended; None without one.
      spent: Returns the elapsed share of the run's time limit: 1 when it is reached.
      details: The `DETAILS` of earlier runs, newest first, back to the last one that read every row.
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
    rejected_until: Position | None = None
    spent: Callable[[], float] = lambda: 0.0
    details: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that failed; the others were processed."""

    record: dict[str, Any]
    error: BaseException


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return both merged: integers are added, at any depth; other values of `other` replace those of `one`."""
    found = dict(one)
    for name, value in other.items():
        before = found.get(name)
        if isinstance(value, Mapping):
            found[name] = merged(before if isinstance(before, Mapping) else {}, value)
        else:
            found[name] = before + value if type(before) is int and type(value) is int else value
    return found


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Result of one batch, valid once its transaction has committed.

    Attributes:
      counts: Numbers to add to the run's counts; other values replace them. `DETAILS` are merged at any depth.
      position: Where the batch ended.
      exhausted: Whether the stage has nothing left after it.
      stop: Reason why the run ends here with rows left, such as ``limit``; None if it continues.
      rows: The changed rows, for events and log lines; empty if nothing needs them.
      failures: Rows to be logged, reported and counted as ``failed``.
      rescued: Rows that a fallback processed after an error. They are reported.
      unreachable: Error of a service that kept some rows from being processed. The run continues, and ends as failed
        with it.
      confirm: Effect outside the database that must not happen for a row that cannot be changed. It is called in the
        transaction once the rows are changed and the event's handlers have been called. An error undoes the batch.
        After `Unconfirmed`, `apply` is called again and changes only the rows for which the effect was confirmed.
    """

    counts: dict[str, Any] = field(default_factory=dict)
    position: Position | None = None
    exhausted: bool = True
    stop: str | None = None
    rows: Sequence[dict[str, Any]] = ()
    failures: Sequence[Failure] = ()
    rescued: Sequence[Failure] = ()
    unreachable: BaseException | None = None
    confirm: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Announcement:
    """Event of a batch with its rows.

    Attributes:
      in_outbox: Whether the stage has stored the rows in the outbox itself, before an effect that cannot be undone.
    """

    event: NamedSignal
    rows: Sequence[dict[str, Any]]
    in_outbox: bool = False


@dataclass(frozen=True, slots=True)
class Backlog:
    """Number of stale rows.

    Attributes:
      rows: The number, or the limit up to which they were counted.
      exact: Whether `rows` is the whole number; otherwise there are more.
    """

    rows: int
    exact: bool = True

    @property
    def is_unknown(self) -> bool:
        """Whether nothing could be counted."""
        return not self.rows and not self.exact

    def exceeds(self, limit: float) -> bool:
        """Return whether there are certainly more rows than the limit."""
        return self.rows > limit or (not self.exact and self.rows >= limit)

    def __str__(self) -> str:
        return "unknown" if self.is_unknown else f"{'' if self.exact else 'at least '}{self.rows:,}"

    def __add__(self, other: Backlog) -> Backlog:
        return Backlog(self.rows + other.rows, self.exact and other.exact)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a stage would do now.

    Attributes:
      stale: The rows it would process.
      counts: The counts that a run would get from this stage.
      oldest, newest: First order column of the first and the last row, usually a time; None if there are none.
      samples: The first rows.
      held: The stale rows that stay because they are on hold; None if the stage has no hold.
      title: Heading of the samples.
    """

    name: str
    stale: Backlog
    counts: dict[str, int]
    oldest: Any = None
    newest: Any = None
    samples: Sequence[dict[str, Any]] = ()
    held: Backlog | None = None
    title: str = "first rows"


class Stage(Protocol):
    """One part of a run's work. The engine owns the loop, the transaction, the counts and the position."""

    @property
    def name(self) -> str:
        """Name within the sweep, also in the cursor in the ledger."""

    @property
    def batch_size(self) -> int:
        """Maximum rows of a batch."""

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of the counts of a run, in display order."""

    @property
    def progress_counts(self) -> tuple[str, ...]:
        """The counts that are processed rows."""

    def prepare(self, batch: Batch) -> Any:
        """Read, and have effects outside the database, outside any transaction. Must be repeatable.

        Returns what `apply` needs.
        """

    def apply(self, batch: Batch, prepared: Any) -> BatchResult:
        """Change the database, within the batch's transaction, and nothing else. It may be called again after a
        rollback."""

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        """Log the changes of the committed batch."""

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        """Return the number of stale rows, counted up to `limit`."""

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        """Return the first order column of the first stale row, usually a time; None if there is none."""

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        """Return what the stage would do now, and change nothing."""


@runtime_checkable
class OtherClock(Protocol):
    """A stage whose times come from the clock of another server than the database."""

    def clock_skew(self) -> ClockSkew:
        """Compare this machine's clock with that server's."""


@runtime_checkable
class OfTables(Protocol):
    """Stage other than a `TableStage` that names the tables it cleans, for `housekeeping coverage`."""

    @property
    def tables(self) -> Sequence[type[Any]]:
        """Their models."""


@runtime_checkable
class Announcing(Protocol):
    """A stage whose batches have events."""

    def announcements(self, result: BatchResult) -> Sequence[Announcement]:
        """Return the events of a batch; called within its transaction, after `apply`."""


@runtime_checkable
class Divisible(Stage, Protocol):
    """A stage whose batch can be bisected, to find the rows that make it fail.

    Its `apply` gets parts of the batch as `batch.only`, with the same `prepared`.
    """

    def positions(self, batch: Batch, prepared: Any) -> list[Position]:
        """Return the position of each row of the batch."""

    def after_all(self, batch: Batch, prepared: Any, positions: Sequence[Position]) -> BatchResult:
        """Return where the stage continues after these rows, without counts."""

    def fallback(self, batch: Batch, error: BaseException) -> BatchResult | None:
        """Process the single row of `batch.only` in another way, in its own transaction; return None if there is
        none."""

    def describe(self, position: Position) -> dict[str, Any]:
        """Return the row for the log and the error tracker."""


@runtime_checkable
class Resizable(Protocol):
    """A stage whose batch size can change during a run. A dataclass with a `batch_size` needs no such method."""

    def resized(self, batch_size: int) -> Stage:
        """Return the stage with this batch size."""


@dataclass(frozen=True, slots=True)
class ExpectedChange:
    """Change of a batch whose result is known before, so that one message can make it and write the ledger's part.

    Attributes:
      text, values: A statement that sets ``housekeeping.batch`` to a JSON array. Unless its first value is true, it has
        done something else, and is rolled back.
      done: Called with the other values once the change is committed.
    """

    text: str
    values: Sequence[Any]
    result: BatchResult
    done: Callable[..., None]


@dataclass(frozen=True, slots=True)
class ExplainQuery:
    """A query that must use an index.

    Attributes:
      what: What it selects, in a few words.
      query: The query as a run sends it.
      model: The table.
      order: Columns that order its rows, for the statement that creates a missing index.
    """

    what: str
    query: Any
    model: Any
    order: Sequence[Any] = ()


@runtime_checkable
class Explainable(Protocol):
    """A stage that lists its queries, for `housekeeping doctor` to explain."""

    def explain_queries(self, now: datetime) -> Sequence[ExplainQuery]:
        """Return the queries of a run that begins now."""


def as_cursor(position: Position | None) -> list[Any] | None:
    """Return a position in a form that JSON can hold and PostgreSQL reads unchanged."""
    if position is None or isinstance(position, Unrecorded):
        return None
    return [_plain(value) for value in position]


def _plain(value: Any) -> Any:
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, bytes | memoryview):
        return value.hex()
    return value.isoformat() if isinstance(value, datetime) else str(value)
