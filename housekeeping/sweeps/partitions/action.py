"""Action that drops whole partitions instead of deleting rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from housekeeping.core.errors import DeclarationError
from housekeeping.sweeps.checks.field_types import check_types

SKIPPED: Final = "skipped_partitions"
FREED: Final = "freed_bytes"
#: A longer wait for a lock stops the application's statements that queue behind it.
_LONGEST_WAIT: Final = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class DropPartitions:
    """Drop the partitions whose whole range is older than a given age.

    ::

        old_events = Sweep(
            name="shop.old_events",
            order=(Event.happened_at,),
            action=DropPartitions(older_than=timedelta(days=365)),
            schedule="30 3 * * *",
        )

    The table is partitioned by range, by the first column of the sweep's `order`. A partition stays if it is the
    DEFAULT partition, if one of its rows does not match the sweep's `stale`, or if a foreign key still refers to it.

    Attributes:
      older_than: Age that the end of a partition's range must have.
      keep_table: Whether the partition is only detached and stays as a table of its own.
      lock_timeout: How long one attempt waits for a lock. Statements of the application may queue behind the wait.
      lock_retries: Further attempts, after pauses of 1, 2, 4 and 8 s. Then the partition stays until the next run.
    """

    older_than: timedelta
    keep_table: bool = False
    lock_timeout: timedelta = timedelta(seconds=2)
    lock_retries: int = 4

    def __post_init__(self) -> None:
        check_types("DropPartitions", self)
        if self.older_than <= timedelta():
            raise DeclarationError(
                f"DropPartitions: older_than is {self.older_than!r}, so partitions that are still in use would be "
                "dropped; write how old a partition must be, such as timedelta(days=365)"
            )
        if not timedelta() < self.lock_timeout <= _LONGEST_WAIT or self.lock_retries < 0:
            raise DeclarationError(
                "DropPartitions: lock_timeout must be longer than nothing and at most 30 seconds, and lock_retries "
                "must not be negative"
            )

    @property
    def counted_as(self) -> Sequence[str]:
        """Names of the counts of a run, in display order."""
        return ("detached_partitions", SKIPPED) if self.keep_table else ("dropped_partitions", FREED, SKIPPED)
