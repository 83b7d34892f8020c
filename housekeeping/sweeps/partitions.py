"""Dropping whole partitions instead of their rows: the action, and the stage that drops one partition in each batch.

A partition is detached before the batch's transaction if PostgreSQL can do that concurrently, and dropped within it.
"""

from __future__ import annotations

import time
from calendar import monthrange
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, replace
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal

from peewee import IntegrityError, OperationalError, PeeweeException, ProgrammingError
from pydantic import Field

from housekeeping.core.errors import DeclarationError
from housekeeping.core.logs import error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.database.connection import database, time_limit
from housekeeping.database.errors import is_lock_timeout, is_timeout
from housekeeping.sweeps import partition_catalog as catalog
from housekeeping.sweeps.conditions import Row
from housekeeping.sweeps.keyset import held_condition
from housekeeping.sweeps.partition_catalog import Partition, PartitionedTable
from housekeeping.sweeps.rows import OfTable, Predicate
from housekeeping.sweeps.stage import Backlog, Batch, BatchResult, StagePlan
from housekeeping.sweeps.tables import column_named
from housekeeping.sweeps.values import declared

logger = named_logger(__name__)

What = Literal["dropped", "detached", "stays", "attached", "busy", "gone"]

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
class DropPartitions(OfTable):
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
      older_than_months: Alternatively, the age in calendar months: one month before 31 March is the last of February.
      key: How the column's values represent times. ``time``: date or timestamp. ``uuid7``: UUID version 7. ``epoch_s``
        and ``epoch_ms``: seconds or milliseconds since 1970. ``text``: ISO 8601, such as ``2026-01`` or ``20260131``.
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
    older_than: timedelta | None = None
    older_than_months: Annotated[int, Field(gt=0)] | None = None
    key: catalog.Key = "time"
    stale: Callable[[Row, datetime], Any] | Callable[[Row], Any] | None = None
    hold: Callable[[Row, datetime], Any] | Callable[[Row], Any] | None = None
    keep_table: bool = False
    lock_timeout: Annotated[timedelta, Field(gt=timedelta(), le=_LONGEST_WAIT)] = timedelta(seconds=2)
    lock_retries: Annotated[int, Field(ge=0)] = 4
    name: str = "partitions"

    def __post_init__(self) -> None:
        if (self.older_than is None) == (self.older_than_months is None):
            raise DeclarationError(
                "DropPartitions: write how old a partition must be, either older_than=timedelta(days=365) or "
                "older_than_months=12"
            )
        if self.older_than is not None and self.older_than <= timedelta():
            raise DeclarationError(
                f"DropPartitions: older_than is {self.older_than!r}, so partitions that are still in use would be "
                "dropped; write how old a partition must be, such as timedelta(days=365)"
            )

    @property
    def age(self) -> str:
        """Text of the age that the end of a partition's range must have."""
        return f"{self.older_than_months} months" if self.older_than is None else str(self.older_than)

    def limit(self, now: datetime) -> datetime:
        """Return the latest end of a range that may be dropped.

        Raises:
          DeclarationError: The time is before the year 1.
        """
        try:
            if self.older_than is not None:
                return now - self.older_than
            year, month = divmod(now.year * 12 + now.month - 1 - (self.older_than_months or 0), 12)
            return now.replace(year=year, month=month + 1, day=min(now.day, monthrange(year, month + 1)[1]))
        except (OverflowError, ValueError):
            age = f"{self.older_than.days:,} days" if self.older_than is not None else self.age
            raise DeclarationError(f"DropPartitions: older_than is {age}, which is before the year 1") from None

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
        return PartitionStage(owner, self)


#: What became of a partition -> the count of its batch; without one it is not counted.
_COUNTED: Final = {
    "dropped": "dropped_partitions",
    "detached": "detached_partitions",
    "stays": _SKIPPED,
    "attached": _SKIPPED,
}
#: Reason of a partition whose rows could not be checked in time.
_UNCHECKED: Final = "its rows could not be checked within statement_timeout"


def _result(partition: Partition, what: What, reason: str | None = None) -> BatchResult:
    """Return the result of a batch.

    Parameters:
      what: ``attached``: again, because a row came before the drop. ``busy``: locked by others, to be tried again.
        ``gone``: another session has taken it over.
      reason: Why it was not dropped; None if it was.
    """
    counts = {_COUNTED[what]: 1} if what in _COUNTED else {}
    if what == "dropped":
        counts[_FREED] = partition.bytes
    return BatchResult(counts, rows=[{"partition": partition, "what": what, "reason": reason}])


class PartitionStage:
    """Stage that drops or detaches the partitions whose range is over; created for each run.

    Parameters:
      worker: The sweep's name. Only this worker finishes what its interrupted runs have left.
      action: The declared stage.

    Attributes:
      table: The table, as `candidates` has read it.
      left_by_others: Name -> the worker that has detached the table and not dropped it, as `candidates` has read them.
    """

    batch_size: Final = 1
    table: PartitionedTable
    left_by_others: Mapping[str, str | None]

    def __init__(self, worker: str, action: DropPartitions) -> None:
        self.name = action.name
        self.worker = worker
        self.model = action.model
        self.column = column_named(worker, self.model, action.column)
        self.action = action
        self.stale = None if action.stale is None else Predicate(action.stale, self.model)
        self.hold = None if action.hold is None else Predicate(action.hold, self.model)
        self.counts = action.counts
        self.progress_counts = action.progress_counts
        self._queue: deque[Partition] | None = None

    def keeping(self, now: datetime) -> dict[str, Any]:
        """Return the conditions of rows that keep their partition, by the reason."""
        found = {}
        if self.stale is not None:
            found["a row does not match `stale`"] = catalog.fails(self.stale(now), self.column.column_name)
        if self.hold is not None:
            found["a row is on hold"] = held_condition(self.hold, self.model, now)
        return found

    def candidates(self, now: datetime) -> list[Partition]:
        """Return the partitions whose range is over, as the catalog has them now, in the order of a run.

        Tables that an interrupted run of this worker has detached come first, also those that are too young since
        `older_than` was changed. A partition that is being detached is next: PostgreSQL detaches one at a time.

        Raises:
          DeclarationError: The table is not partitioned by ranges of the sweep's column.
        """
        table, column = catalog.read_partitions(self.model, self.action.key), self.column.column_name
        if table.column != column:
            raise DeclarationError(
                f"{table.name} is partitioned by {table.column} and not by {column}; "
                f'write DropPartitions({self.model.__name__}, "{table.column}", ...)'
            )
        self._limit = self.action.limit(now)
        left = catalog.detached_from(table)
        self.table, self._keeping = table, self.keeping(now)
        own = [each for each in left if each.worker == self.worker]
        self.left_by_others = {each.name: each.worker for each in left if each.worker != self.worker}
        ended = [each for each in table.partitions if self._is_over(each)]
        return [*own, *sorted(ended, key=lambda each: each.state != "pending")]

    def reason_to_stay(self, partition: Partition, within: timedelta | None = None) -> str | None:
        """Return why a candidate must stay; None if it can be dropped.

        Parameters:
          within: Time limit of each query; None for that of the session.
        """
        try:
            with database.atomic() if within is None else time_limit(within):
                return self._reason(partition)
        except OperationalError as error:
            if not is_timeout(error) or (within is None and is_lock_timeout(error)):
                raise
            return _UNCHECKED

    def _reason(self, partition: Partition) -> str | None:
        pending = next((each for each in self.table.partitions if each.state == "pending"), None)
        if pending is not None and partition.state == "attached" and not self._is_over(pending):
            return f"{pending.name} is being detached; complete it: ALTER TABLE ... DETACH PARTITION ... FINALIZE"
        return catalog.reason_of_keys(partition, drops=self._drops) or self._reason_of_rows(partition)

    def _reason_of_rows(self, partition: Partition) -> str | None:
        if not self._is_over(partition):
            return "its range is no longer over"
        return catalog.reason_of_rows(self.model, partition, self._keeping, drops=self._drops)

    @property
    def _drops(self) -> bool:
        return not self.action.keep_table

    def _is_over(self, partition: Partition) -> bool:
        return self.table.is_older(partition, self._limit)

    def prepare(self, batch: Batch) -> tuple[Partition | None, BatchResult | None]:
        """Choose the next partition, and detach it if PostgreSQL can do that concurrently.

        Returns the partition, None if nothing is left or the run has to end first; and its result, if known already.
        """
        if self._queue is None:
            self._queue = deque(self.candidates(batch.now))
            if warning := self.table.warning(batch.now):
                logger.warning("No partition follows", reason=warning)
            catalog.forget_attached(self.worker, self.table)
        if not self._queue or not self._pause(self._queue[0], batch):
            return None, None
        partition = self._queue.popleft()
        try:
            # Another one is finished first, and checked then: its rows are missing from the table.
            if partition.state == "attached":
                reason = self.reason_to_stay(partition)
                if reason is not None:
                    return partition, _result(partition, "stays", reason)
                batch.time_is_up()  # sends a heartbeat if the check took long
                if self.table.detaches_concurrently:
                    self.detach_first(partition, batch.check)
        except PeeweeException as error:
            return partition, self._result_of(error, partition)
        return partition, None

    def detach_first(self, partition: Partition, check: Callable[[], None]) -> None:
        """Record and detach the partition in transactions of their own, unless another session has changed it.

        Parameters:
          check: Raises if another run may have begun. It begins no detachment meanwhile.
        """
        table = self.table
        with catalog.alone(table, self.action.lock_timeout):
            check()
            state = catalog.state_of(table, partition)
            if state == "pending":  # since an earlier attempt
                partition.state = state
            # A record of a table that another session has detached would let the next run drop it.
            if state != "attached":
                return
            catalog.record_detachment(self.worker, table, partition)
            try:
                catalog.detach_concurrently(table, partition)
            except PeeweeException:
                catalog.forget_attached(self.worker, table)
                raise
        partition.state = "detached"

    def apply(self, batch: Batch, prepared: tuple[Partition | None, BatchResult | None]) -> BatchResult:
        """Drop or release the partition in the batch's transaction, after its rows were checked once more."""
        partition, result = prepared
        if partition is None:
            return BatchResult(exhausted=not self._queue)
        if result is None:
            try:
                result = self._remove(partition)
            except PeeweeException as error:
                result = self._result_of(error, partition)
        is_busy, reason = result.rows[0]["what"] == "busy", result.rows[0]["reason"]
        if is_busy and partition.attempts >= self.action.lock_retries:
            result = _result(partition, "stays", f"it was locked in {partition.attempts + 1} attempts: {reason}")
            is_busy = False
        return replace(result, exhausted=not self._queue and not is_busy)

    def _remove(self, partition: Partition) -> BatchResult:
        """Drop, release or attach the partition in a savepoint, with a limit on each wait."""
        table, statement = self.table, f"ALTER TABLE {self.table.name} DETACH PARTITION {partition.name}"
        with database.atomic(), catalog.waiting_at_most(self.action.lock_timeout):
            if partition.state == "pending":
                catalog.be_alone(table)  # another run may be detaching it
            if self._keeping or partition.state != "attached":
                # Only this partition is locked while its rows are read. Reads of other sessions are not affected.
                catalog.change(f"LOCK TABLE {partition.name} IN SHARE ROW EXCLUSIVE MODE")
            else:
                # The lock that detaching needs, so that the partition can no longer change.
                catalog.change(f"LOCK TABLE ONLY {table.name} IN ACCESS EXCLUSIVE MODE")
            state = catalog.state_of(table, partition)
            if state == "pending" and partition.state == "attached":
                partition.state = state
                return _result(partition, "busy", "another session is detaching it")
            if state != partition.state:
                return _result(partition, "gone", "another session has dropped or changed it")
            reason = self._reason_of_rows(partition) if state == "attached" else self._reason(partition)
            if reason is not None and state == "attached":
                return _result(partition, "stays", reason)
            if state == "pending":
                catalog.record_detachment(self.worker, table, partition)  # in case that it cannot be attached again
            if state != "detached":
                catalog.change(statement + (" FINALIZE" if state == "pending" else ""))
            if reason is not None:
                return self._attach(partition, reason)
            catalog.forget_detachment(partition)
            if self.action.keep_table:
                return _result(partition, "detached")
            catalog.change(f"DROP TABLE {partition.name}")
            return _result(partition, "dropped")

    def _attach(self, partition: Partition, reason: str) -> BatchResult:
        name = self.table.name
        try:
            with database.atomic():
                catalog.change(f"ALTER TABLE {name} ATTACH PARTITION {partition.name} {partition.bounds}")
                catalog.forget_detachment(partition)
        except (ProgrammingError, IntegrityError) as error:
            # Its range has another partition by now, or rows in the DEFAULT partition.
            return _result(partition, "stays", f"{reason}, but it cannot be attached again: {error_line(error)}")
        return _result(partition, "attached", reason)

    def _result_of(self, error: PeeweeException, partition: Partition) -> BatchResult:
        """Return what an error says about the partition; raise it if it concerns the whole run."""
        what = catalog.outcome_of(error)
        # If the partition is there, the predicate reads a table that is not.
        if what is None or (what == "gone" and catalog.state_of(self.table, partition) == partition.state):
            raise error
        return _result(partition, what, error_line(error))

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        """Log what became of the partition. One that was locked is tried again."""
        for row in result.rows:
            partition: Partition = row["partition"]
            name, bounds, reason = partition.name, partition.bounds, row["reason"]
            match row["what"]:
                case "dropped":
                    logger.info("Partition dropped", partition=name, range=bounds, freed_bytes=partition.bytes)
                case "detached":
                    logger.info("Partition detached", partition=name, range=bounds)
                case "gone":
                    logger.info("Partition is gone", partition=name, range=bounds, reason=reason)
                    catalog.forget_attached(self.worker, self.table)
                case "attached":
                    logger.warning("Partition was attached again", partition=name, range=bounds, reason=reason)
                case "busy":
                    logger.info("Partition is locked; retrying", partition=name, range=bounds, reason=reason)
                    partition.attempts += 1
                    assert self._queue is not None
                    self._queue.appendleft(partition)
                case "stays":
                    logger.warning("Partition stays", partition=name, range=bounds, reason=reason)

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
        found = [(each, self.reason_to_stay(each)) for each in self.candidates(now)]
        leaving = [each for each, reason in found if reason is None]
        counts = {self.action.counted_as[0]: len(leaving), _SKIPPED: len(found) - len(leaving)}
        if not self.action.keep_table:
            counts[_FREED] = sum(each.bytes for each in leaving)
        begins = sorted(each.begins for each in leaving if each.begins is not None)
        samples = [
            {
                "partition": each.name,
                "range": each.bounds.removeprefix("FOR VALUES "),
                "rows": each.rows,
                "bytes": each.bytes,
                "stays": reason,
            }
            for each, reason in found
        ]
        return StagePlan(
            self.name,
            Backlog(len(leaving)),
            counts,
            next(iter(begins), None),
            begins[-1] if begins else None,
            samples,
            title="partitions whose range is over",
        )

    def _due(self, now: datetime) -> list[Partition]:
        return [each for each in self.candidates(now) if self.reason_to_stay(each, _QUICK) in (None, _UNCHECKED)]

    def _pause(self, partition: Partition, batch: Batch) -> bool:
        """Wait before another attempt; return whether the run continues."""
        pause_s = min(2 ** (partition.attempts - 1), _LONGEST_PAUSE_S) if partition.attempts else 0
        ends_at = time.monotonic() + pause_s
        while time.monotonic() < ends_at:
            if batch.time_is_up():
                return False
            time.sleep(_LOOK_S)
        return True
