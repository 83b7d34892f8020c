"""One partition that a run is about."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from peewee import OperationalError

from housekeeping.database.connection import database
from housekeeping.sweeps.partitions import marks
from housekeeping.sweeps.partitions.catalog import Partition, PartitionedTable
from housekeeping.sweeps.partitions.detaching import be_alone, is_busy, waiting_at_most

#: Longest pause between two attempts to lock a partition.
_LONGEST_PAUSE_S: Final = 8
#: A mark that is left does no harm as long as the partition is attached.
_RELEASE_TIMEOUT: Final = timedelta(seconds=1)


@dataclass(slots=True)
class Candidate:
    """Partition to be detached and dropped.

    Attributes:
      is_detached: Whether it is a table of its own already.
      is_over: Whether its range is over. It may be too young since `older_than` was changed, if it is detached.
      attempts: How often it was locked by others.
    """

    partition: Partition
    is_detached: bool = False
    is_over: bool = True
    attempts: int = 0

    @property
    def needs_checks(self) -> bool:
        """Whether it can still stay as it is. One that is being detached is checked once it is detached."""
        return not (self.is_detached or self.partition.pending)

    @property
    def begins(self) -> datetime | None:
        """The beginning of the range, or its end if it has no beginning."""
        return self.partition.lower or self.partition.upper

    @property
    def pause_s(self) -> int:
        """Seconds before the next attempt."""
        return min(2 ** (self.attempts - 1), _LONGEST_PAUSE_S) if self.attempts else 0

    def is_pending(self) -> bool:
        """Return whether a DETACH CONCURRENTLY of the partition has begun and has to be completed."""
        row: Any = database.execute_sql(
            "SELECT (to_jsonb(pg_inherits) ->> 'inhdetachpending')::boolean FROM pg_inherits WHERE inhrelid = %s",
            (self.partition.id,),
        ).fetchone()
        return row is not None and bool(row[0])

    def release(self, worker: str, table: PartitionedTable) -> None:
        """Remove the worker's mark from a partition that stays attached. If it is locked, a later run does so."""
        if self._mark_of(worker) is None:
            return
        try:
            with database.atomic(), waiting_at_most(_RELEASE_TIMEOUT):
                # Otherwise a run that is about to detach the partition would leave it without a mark.
                be_alone(table)
                comment = self._mark_of(worker)
                if comment is not None:
                    marks.remove_mark(self.partition.name, comment)
        except OperationalError as error:
            if not is_busy(error):
                raise

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

    def _mark_of(self, worker: str) -> str | None:
        """Return the comment with the worker's mark, if the partition is attached and stays so; None otherwise."""
        is_partition, comment = marks.current_comment(self.partition) or (False, None)
        mark = marks.mark_of(comment)
        is_released = is_partition and mark is not None and mark.worker == worker and not self.is_pending()
        return comment if is_released else None
