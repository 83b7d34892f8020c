"""Dropping whole partitions instead of their rows: the action, and the stage that drops one partition in each batch.

A partition is detached before the batch's transaction if PostgreSQL can do that concurrently, and dropped within it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal

from peewee import Field as Column
from peewee import IntegrityError, Model, OperationalError, PeeweeException, ProgrammingError
from pydantic import Field

from housekeeping.core.errors import DeclarationError
from housekeeping.core.logs import error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.database.connection import database, time_limit
from housekeeping.database.errors import is_lock_timeout, is_timeout
from housekeeping.sweeps import partition_catalog as catalog
from housekeeping.sweeps.keyset import Hold, held_condition
from housekeeping.sweeps.partition_catalog import Keeping, Partition
from housekeeping.sweeps.row import Row
from housekeeping.sweeps.rows import Predicate
from housekeeping.sweeps.stage import Backlog, Batch, BatchResult, StagePlan
from housekeeping.sweeps.tables import column_named, model_of
from housekeeping.sweeps.values import declared

logger = named_logger(__name__)

_SKIPPED: Final = "skipped_partitions"
_FREED: Final = "freed_bytes"
#: A longer wait for a lock stops the application's statements that queue behind it.
_LONGEST_WAIT: Final = timedelta(seconds=30)
#: Longest pause between two attempts to lock a partition.
_LONGEST_PAUSE_S: Final = 8
#: How often a pause between two attempts looks whether the run has to end.
_LOOK_S: Final = 0.2
#: Time limit for one partition in a backlog, which is read often.
_QUICK: Final = timedelta(seconds=1)


@declared
class DropPartitions:
    """Stage that drops the partitions whose whole range is older than a given age.

    ::

        old_events = Sweep(
            "shop.old_events",
            DropPartitions(Event, "happened_at", older_than=timedelta(days=365)),
            schedule="30 3 * * *",
        )

    A partition stays if it is the DEFAULT partition, if one of its rows does not match `stale` or is on hold, or if a
    foreign key still refers to it.

    Attributes:
      table: As in `Rows`. It is partitioned by range, by the column.
      column: Name of the column by which the table is partitioned.
      older_than: Age that the end of a partition's range must have.
      stale: Condition that every row of a partition must meet; None if the age of the range decides alone.
      hold: Returns the condition of rows that keep their partition, as in `Rows`.
      keep_table: Whether the partition is only detached and stays as a table of its own.
      lock_timeout: How long one attempt waits for a lock. Statements of the application may queue behind the wait.
      lock_retries: Further attempts, after pauses of 1, 2, 4 and 8 s. Then the partition stays until the next run.
      name: Name of the stage in plans.
    """

    table: Any
    column: str
    _: KW_ONLY
    older_than: timedelta
    stale: Callable[[Row, datetime], Any] | Callable[[Row], Any] | None = None
    hold: Callable[[Row, datetime], Any] | Callable[[Row], Any] | None = None
    keep_table: bool = False
    lock_timeout: Annotated[timedelta, Field(gt=timedelta(), le=_LONGEST_WAIT)] = timedelta(seconds=2)
    lock_retries: Annotated[int, Field(ge=0)] = 4
    name: str = "partitions"

    def __post_init__(self) -> None:
        if self.older_than <= timedelta():
            raise DeclarationError(
                f"DropPartitions: older_than is {self.older_than!r}, so partitions that are still in use would be "
                "dropped; write how old a partition must be, such as timedelta(days=365)"
            )

    @property
    def is_named(self) -> bool:
        """Whether the table is given by its name, so that only the database knows its columns."""
        return isinstance(self.table, str)

    @property
    def model(self) -> type[Model]:
        """The table's model; see `Rows.model`."""
        return model_of(self.table)

    @property
    def partition_key(self) -> Column[Any]:
        """The column by which the table is partitioned."""
        return column_named("DropPartitions", self.model, self.column)

    @property
    def counted_as(self) -> Sequence[str]:
        """Names of the counts of a run, in display order."""
        return ("detached_partitions", _SKIPPED) if self.keep_table else ("dropped_partitions", _FREED, _SKIPPED)

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of all counts of a run."""
        return (*self.counted_as, "batches", "out_of_time")

    @property
    def progress_counts(self) -> tuple[str, ...]:
        """The count of processed partitions."""
        return tuple(self.counted_as)[:1]

    def stage(self, owner: str) -> PartitionStage:
        """Return the stage of a run.

        Parameters:
          owner: The sweep's name.
        """
        model = self.model
        stale = None if self.stale is None else Predicate(self.stale, model)
        hold = None if self.hold is None else Predicate(self.hold, model)
        return PartitionStage(self.name, owner, model, self.partition_key, self, stale, hold)


@dataclass(slots=True)
class Candidate:
    """Partition to be detached and dropped.

    Attributes:
      is_detached: Whether it is a table of its own already.
      is_over: Whether its range is over. It may be too young since `older_than` was changed, if it is detached.
      is_recorded: Whether this run has recorded that it detaches it.
      attempts: How often it was locked by others.
    """

    partition: Partition
    is_detached: bool = False
    is_over: bool = True
    is_recorded: bool = False
    attempts: int = 0

    @property
    def begins(self) -> datetime | None:
        """The beginning of the range, or its end if it has no beginning."""
        return self.partition.lower or self.partition.upper

    def described(self, reason: str | None) -> dict[str, Any]:
        """Return the partition as a row of a plan."""
        partition = self.partition
        return {
            "partition": partition.name,
            "range": partition.bounds.removeprefix("FOR VALUES "),
            "rows": partition.rows,
            "bytes": partition.bytes,
            "stays": reason,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the attempt to drop a partition.

    Attributes:
      what: ``attached``: again, because a row came before the drop. ``busy``: locked by others, to be tried again.
        ``gone``: another session has taken it over.
      reason: Why it was not dropped; None if it was.
      freed: Bytes that the drop frees.
    """

    what: Literal["dropped", "detached", "stays", "attached", "busy", "gone"]
    reason: str | None = None
    freed: int = 0

    @property
    def counts(self) -> dict[str, Any]:
        """What the batch counts."""
        if self.what == "dropped":
            return {"dropped_partitions": 1, _FREED: self.freed}
        if self.what == "detached":
            return {"detached_partitions": 1}
        return {_SKIPPED: 1} if self.what in ("stays", "attached") else {}

    def log(self, partition: Partition) -> None:
        """Write the log line of the committed batch."""
        name, bounds = partition.name, partition.bounds
        if self.what == "dropped":
            logger.info("Partition dropped", partition=name, range=bounds, freed_bytes=self.freed)
        elif self.what == "detached":
            logger.info("Partition detached", partition=name, range=bounds)
        elif self.what == "gone":
            logger.info("Partition is gone", partition=name, range=bounds, reason=self.reason)
        elif self.what == "busy":
            logger.info("Partition is locked and tried again", partition=name, range=bounds, reason=self.reason)
        elif self.what == "attached":
            logger.warning("Partition was attached again", partition=name, range=bounds, reason=self.reason)
        else:
            logger.warning("Partition stays", partition=name, range=bounds, reason=self.reason)


class _Stays(Exception):
    """Rolls back the work on a partition that must stay."""


class Candidates:
    """Partitions of a table that a run is about, and what it does with them.

    Attributes:
      detached: Tables that an interrupted run of this worker has left.
      left_by_others: Name -> the worker that has detached the table and not dropped it.
      ended: Partitions whose range is over, oldest first.
      keeping: Conditions of rows that keep their partition.
    """

    def __init__(self, stage: PartitionStage, now: datetime) -> None:
        """Read the candidates from the catalog.

        Raises:
          DeclarationError: The table is not partitioned by ranges of the stage's column.
        """
        self.table = table = catalog.read_partitions(stage.model)
        column = stage.column.column_name
        if table.column != column:
            raise DeclarationError(
                f"{table.name} is partitioned by {table.column} and not by {column}; "
                f'write DropPartitions({stage.model.__name__}, "{table.column}", ...)'
            )
        age = stage.action.older_than
        try:
            limit = now - age
        except OverflowError:
            raise DeclarationError(
                f"DropPartitions: older_than is {age.days:,} days, which is before the year 1"
            ) from None
        left = catalog.detached_from(table)
        self.worker, self.model, self.action = stage.worker, stage.model, stage.action
        self.detached = [
            Candidate(each, is_detached=True, is_over=table.is_older(each.upper, limit))
            for each in left
            if each.detached_by == stage.worker
        ]
        self.left_by_others = {
            each.name: each.detached_by for each in left if each.detached_by not in (None, stage.worker)
        }
        self.ended = [Candidate(each) for each in table.older_than(limit)]
        self.keeping = stage.keeping(now)

    def all(self) -> list[Candidate]:
        """Return the candidates in the order in which a run takes them.

        A partition that is being detached comes first, because PostgreSQL detaches one at a time.
        """
        return [*self.detached, *sorted(self.ended, key=lambda each: not each.partition.pending)]

    def reason_to_stay(self, candidate: Candidate) -> str | None:
        """Return why the candidate must stay; None if it can be dropped."""
        try:
            with database.atomic():
                return self._reason(candidate)
        except OperationalError as error:
            if not is_timeout(error) or is_lock_timeout(error):
                raise
            return "its rows could not be checked within statement_timeout"

    def is_due(self, candidate: Candidate) -> bool:
        """Return whether the next run would drop the candidate; True if its rows cannot be checked within a second."""
        try:
            with time_limit(_QUICK):
                return self._reason(candidate) is None
        except OperationalError as error:
            if not is_timeout(error):
                raise
            return True

    def _reason(self, candidate: Candidate) -> str | None:
        pending = next((each for each in self.table.partitions if each.pending), None)
        if pending is not None and all(each.partition.id != pending.id for each in self.ended):
            return f"{pending.name} is being detached; complete it: ALTER TABLE ... DETACH PARTITION ... FINALIZE"
        reason = catalog.reason_of_catalog(candidate.partition, drops=not self.action.keep_table)
        return reason or self._reason_of_rows(candidate)

    def _reason_of_rows(self, candidate: Candidate) -> str | None:
        if not candidate.is_over:
            return "its range is no longer over"
        return catalog.reason_of_rows(self.model, candidate.partition, self.keeping)

    def detach_first(self, candidate: Candidate, check: Callable[[], None]) -> None:
        """Record and detach the partition concurrently, or complete its detachment, in transactions of their own.

        Parameters:
          check: Raises if another run may have begun. It begins no detachment meanwhile.
        """
        table, partition, lock_timeout = self.table, candidate.partition, self.action.lock_timeout
        candidate.is_recorded = True
        # Another session's detachment makes the attempt fail, and the next one looks again.
        if partition.pending or (candidate.attempts and catalog.state_of(partition) == "pending"):
            with database.atomic(), catalog.waiting_at_most(lock_timeout):
                catalog.be_alone(table)
                check()
                catalog.record_detachment(self.worker, table, partition)
                catalog.finish_detaching(table, partition)
        else:
            with catalog.alone(table, lock_timeout):
                check()
                catalog.record_detachment(self.worker, table, partition)
                catalog.detach_concurrently(table, partition)
        candidate.is_detached = True

    def remove(self, candidate: Candidate) -> Outcome:
        """Drop or release the partition in the open transaction, after its rows were checked once more under a lock."""
        try:
            try:
                return self._remove(candidate)
            except PeeweeException as error:
                if not (candidate.is_detached and catalog.is_referred(error)):
                    raise
                return self._remove(candidate, error_line(error))
        except _Stays as stays:
            return Outcome("stays", str(stays))
        except PeeweeException as error:
            return outcome_of(error, candidate)

    def _remove(self, candidate: Candidate, reason: str | None = None) -> Outcome:
        """Drop or release the partition in a savepoint, with a limit on each wait.

        Parameters:
          reason: Why a detached partition has to stay; None if its rows decide.

        Raises:
          _Stays: It stays as it is; what was locked has been released.
        """
        table, partition = self.table, candidate.partition
        with database.atomic(), catalog.waiting_at_most(self.action.lock_timeout):
            if self.keeping or candidate.is_detached:
                # Only this partition is locked while its rows are read.
                catalog.lock_against_writes(partition)
            else:
                catalog.lock_table(table)
            state = catalog.state_of(partition)
            if state is None:
                return Outcome("gone", "another session has dropped it")
            was_recorded = catalog.forget_detachment(partition)
            if candidate.is_detached and (state != "detached" or not was_recorded):
                return Outcome("gone", "its record was removed, or it was attached again")
            reason = reason or self._reason_of_rows(candidate)
            if reason is None:
                if not candidate.is_detached:
                    catalog.detach(table, partition)
                if self.action.keep_table:
                    return Outcome("detached")
                return Outcome("dropped", freed=catalog.drop(partition))
            if not candidate.is_detached:
                raise _Stays(reason)
            try:
                with database.atomic():
                    catalog.attach(table, partition)
            except (ProgrammingError, IntegrityError) as error:
                # Its range has another partition by now, or rows in the DEFAULT partition.
                raise _Stays(f"{reason}, but it cannot be attached again: {error_line(error)}") from error
            return Outcome("attached", reason)


def outcome_of(error: PeeweeException, candidate: Candidate) -> Outcome:
    """Return what an error says about the partition; raise it if it concerns the whole run."""
    if catalog.is_busy(error):
        return Outcome("busy", error_line(error))
    if catalog.is_gone(error):
        state = catalog.state_of(candidate.partition)
        if state is not None and (state == "detached") is candidate.is_detached:
            raise error  # the partition is there; the predicate reads a table that is not
        return Outcome("gone", error_line(error))
    if catalog.is_referred(error):
        return Outcome("stays", error_line(error))
    raise error


@dataclass(slots=True)
class _Prepared:
    """A partition before the transaction of its batch.

    Attributes:
      candidate: None if nothing is left, or if the run has to end first.
      ended: Its outcome, if known already; None if the transaction decides.
    """

    candidate: Candidate | None = None
    ended: Outcome | None = None


class PartitionStage:
    """Stage that drops or detaches the partitions whose range is over; created for each run.

    Parameters:
      worker: The sweep's name. Only this worker finishes what its interrupted runs have left.
      model: The partitioned table.
      column: The first column of the sweep's `order`, by which the table is partitioned.
      stale: The sweep's predicate; None if the age of the range decides alone.
      hold: Returns the condition of the rows on hold, which keep their partition; None if the sweep has no holds.
    """

    batch_size: Final = 1

    def __init__(
        self,
        name: str,
        worker: str,
        model: type[Model],
        column: Any,
        action: DropPartitions,
        stale: Callable[[datetime], Any] | None = None,
        hold: Hold | None = None,
    ) -> None:
        self.name = name
        self.worker = worker
        self.model = model
        self.column = column
        self.action = action
        self.stale = stale
        self.hold = hold
        self.counts = action.counts
        self.progress_counts = action.progress_counts
        self._candidates: Candidates | None = None
        self._queue: deque[Candidate] = deque()

    def resized(self, batch_size: int) -> PartitionStage:
        """Return this stage: a batch is always one partition."""
        return self

    def keeping(self, now: datetime) -> list[Keeping]:
        """Return the conditions of rows that keep their partition."""
        found = []
        if self.stale is not None:
            stays = catalog.fails(self.stale(now), self.column.column_name)
            found.append(Keeping(stays, "a row does not match `stale`"))
        if self.hold is not None:
            found.append(Keeping(held_condition(self.hold, self.model, now), "a row is on hold"))
        return found

    def conditions(self, now: datetime) -> list[Any]:
        """Return the partition key and the conditions on rows, without a query."""
        rows = [] if self.stale is None else [self.stale(now)]
        return [self.column, *rows, *([] if self.hold is None else [held_condition(self.hold, self.model, now)])]

    def prepare(self, batch: Batch) -> _Prepared:
        """Choose the next partition, and detach it if PostgreSQL can do that concurrently."""
        if self._candidates is None:
            self._candidates = self.candidates(batch.now)
            self._queue = deque(self._candidates.all())
            catalog.forget_attached(self.worker, self._candidates.table)
        if not self._queue or not self._pause(self._queue[0], batch):
            return _Prepared()
        candidate = self._queue.popleft()
        table, is_pending = self._candidates.table, candidate.partition.pending
        try:
            # One that is being detached is checked once it is detached.
            needs_check = not (candidate.is_detached or is_pending)
            reason = self._candidates.reason_to_stay(candidate) if needs_check else None
            if reason is not None:
                return _Prepared(candidate, Outcome("stays", reason))
            batch.time_is_up()  # sends a heartbeat if the check took long
            if not candidate.is_detached and (is_pending or table.detaches_concurrently):
                self._candidates.detach_first(candidate, batch.check)
        except PeeweeException as error:
            return _Prepared(candidate, outcome_of(error, candidate))
        return _Prepared(candidate)

    def apply(self, batch: Batch, prepared: _Prepared) -> BatchResult:
        """Drop or release the partition in the batch's transaction, after its rows were checked once more."""
        candidate = prepared.candidate
        if candidate is None:
            return BatchResult(exhausted=not self._queue)
        assert self._candidates is not None
        outcome = prepared.ended or self._candidates.remove(candidate)
        if outcome.what == "busy" and candidate.attempts >= self.action.lock_retries:
            outcome = Outcome("stays", f"it was locked in {candidate.attempts + 1} attempts: {outcome.reason}")
        exhausted = not self._queue and outcome.what != "busy"
        row = {"candidate": candidate, "outcome": outcome}
        return BatchResult(outcome.counts, exhausted=exhausted, rows=[row])

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        """Log what became of the partition. One that was locked is tried again."""
        for row in result.rows:
            candidate, outcome = row["candidate"], row["outcome"]
            outcome.log(candidate.partition)
            if outcome.what == "busy":
                candidate.attempts += 1
                self._queue.appendleft(candidate)
            elif outcome.what == "stays" and candidate.is_recorded:
                assert self._candidates is not None
                catalog.forget_attached(self.worker, self._candidates.table)

    def candidates(self, now: datetime) -> Candidates:
        """Return the partitions whose range is over, as the catalog has them now.

        Raises:
          DeclarationError: The table is not partitioned by the sweep's column.
        """
        return Candidates(self, now)

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        """Return the number of partitions that the next run would drop.

        Note: Includes those that cannot be checked within a second.
        """
        number = len(self._due(now))
        return Backlog(min(number, limit), number <= limit)

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        """Return the beginning of the oldest partition of the backlog, or its end if it has no beginning."""
        return min((each.begins for each in self._due(now) if each.begins is not None), default=None)

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        """Return the partitions whose range is over, with the reason why one stays."""
        candidates = self.candidates(now)
        found = [(each, candidates.reason_to_stay(each)) for each in candidates.all()]
        leaving = [each for each, reason in found if reason is None]
        counts = {self.action.counted_as[0]: len(leaving), _SKIPPED: len(found) - len(leaving)}
        if not self.action.keep_table:
            counts[_FREED] = sum(each.partition.bytes for each in leaving)
        begins = sorted(each.begins for each in leaving if each.begins is not None)
        return StagePlan(
            self.name,
            Backlog(len(leaving)),
            counts,
            next(iter(begins), None),
            begins[-1] if begins else None,
            [each.described(reason) for each, reason in found],
            title="partitions whose range is over",
        )

    def _due(self, now: datetime) -> list[Candidate]:
        candidates = self.candidates(now)
        return [each for each in candidates.all() if candidates.is_due(each)]

    def _pause(self, candidate: Candidate, batch: Batch) -> bool:
        """Wait before another attempt; return whether the run continues."""
        pause_s = min(2 ** (candidate.attempts - 1), _LONGEST_PAUSE_S) if candidate.attempts else 0
        ends_at = time.monotonic() + pause_s
        while time.monotonic() < ends_at:
            if batch.time_is_up():
                return False
            time.sleep(_LOOK_S)
        return True
