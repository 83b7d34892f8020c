"""Partitions whose range is over, and the tables that an interrupted run has detached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Self

from peewee import Model, OperationalError

from housekeeping.core.errors import DeclarationError
from housekeeping.database.connection import database
from housekeeping.database.time_limit import time_limit
from housekeeping.sweeps.partitions import marks
from housekeeping.sweeps.partitions.action import DropPartitions
from housekeeping.sweeps.partitions.candidate import Candidate
from housekeeping.sweeps.partitions.catalog import Partition, PartitionedTable, read_partitions
from housekeeping.sweeps.partitions.must_stay import (
    Keeping,
    is_too_slow,
    reason_of_catalog,
    reason_of_rows,
)

#: Time limit for one partition in a backlog, which is read often.
_QUICK: Final = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Partitions of a table that a run is about.

    Attributes:
      worker: The worker that drops them.
      detached: Tables that an interrupted run of this worker has left, first.
      left_by_others: Name -> the worker that has detached the table and not dropped it.
      ended: Partitions whose range is over, oldest first.
      keeping: Conditions of rows that keep their partition.
    """

    worker: str
    model: type[Model]
    action: DropPartitions
    table: PartitionedTable
    detached: Sequence[Candidate]
    left_by_others: dict[str, str]
    ended: Sequence[Candidate]
    keeping: Sequence[Keeping]

    @classmethod
    def read(
        cls,
        worker: str,
        model: type[Model],
        column: Any,
        action: DropPartitions,
        now: datetime,
        keeping: Sequence[Keeping],
    ) -> Self:
        """Read the candidates from the catalog.

        Raises:
          DeclarationError: The table is not partitioned by ranges of this column.
        """
        table = read_partitions(model)
        if table.column != column.column_name:
            raise DeclarationError(
                f"{table.name} is partitioned by {table.column}, but order begins with {column.column_name}; "
                f"write order=({model.__name__}.{table.column},)"
            )
        limit = _limit(now, action.older_than)
        left = marks.detached_from(table)
        own = [
            Candidate(each, is_detached=True, is_over=table.is_older(each.upper, limit))
            for each, mark in left
            if mark.worker == worker
        ]
        others = {each.name: mark.worker for each, mark in left if mark.worker != worker}
        ended = [Candidate(each) for each in table.older_than(limit)]
        return cls(worker, model, action, table, own, others, ended, keeping)

    def all(self) -> list[Candidate]:
        """Return the candidates in the order in which a run takes them.

        A partition that is being detached comes first, because PostgreSQL detaches one at a time.
        """
        return [*self.detached, *sorted(self.ended, key=lambda each: not each.partition.pending)]

    def release_others(self) -> None:
        """Remove the marks of partitions that an interrupted run wanted to detach and that this run is not about."""
        ended = [each.partition.id for each in self.ended]
        for partition in self.table.partitions:
            if partition.id not in ended and marks.mark_of(partition.comment) is not None:
                Candidate(partition).release(self.worker, self.table)

    def reason_to_stay(self, candidate: Candidate) -> str | None:
        """Return why the candidate must stay; None if it can be dropped."""
        try:
            with database.atomic():
                return self._reason(candidate)
        except OperationalError as error:
            if not is_too_slow(error):
                raise
            return "its rows could not be checked within statement_timeout"

    def is_due(self, candidate: Candidate) -> bool:
        """Return whether the next run would drop the candidate, as far as a check of a second can tell."""
        try:
            with time_limit(_QUICK):
                return self._reason(candidate) is None
        except OperationalError as error:
            if not is_too_slow(error):
                raise
            return True

    def reason_of_rows(self, candidate: Candidate) -> str | None:
        """Return why the rows of the candidate keep it; None if no row does. Requires a transaction."""
        if not candidate.is_over:
            return "its range is no longer over"
        return reason_of_rows(self.model, candidate.partition, self.keeping)

    def _reason(self, candidate: Candidate) -> str | None:
        pending = self._pending_of_others()
        if pending is not None:
            return f"{pending.name} is being detached; complete it: ALTER TABLE ... DETACH PARTITION ... FINALIZE"
        reason = reason_of_catalog(candidate.partition, drops=not self.action.keep_table)
        return reason or self.reason_of_rows(candidate)

    def _pending_of_others(self) -> Partition | None:
        """Return the partition that is being detached although its range is not over."""
        pending = next((each for each in self.table.partitions if each.pending), None)
        own = [each.partition.id for each in self.ended]
        return None if pending is None or pending.id in own else pending


def _limit(now: datetime, age: timedelta) -> datetime:
    try:
        return now - age
    except OverflowError:
        raise DeclarationError(f"DropPartitions: older_than is {age.days:,} days, which is before the year 1") from None
