"""Table of the git ref cleanup."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import IntEnum
from typing import Final

from peewee import SQL, BigAutoField, BigIntegerField, CharField, SmallIntegerField

from housekeeping import PartitionedModel, StateMachine, UtcDateTimeField, identify, statement_time

LONGEST_REF: Final = 1024  # characters; docs/workers/batched_git_ref_updates.md


class DeletionStatus(IntEnum):
    """Status of a request to delete a ref."""

    pending = 1
    processed = 2


class Deletion(PartitionedModel):
    """Request to delete a ref of a project's repository."""

    id = BigAutoField()
    project_id = BigIntegerField()
    ref = CharField(LONGEST_REF)
    status = SmallIntegerField(default=DeletionStatus.pending, constraints=[SQL("DEFAULT 1")])
    created_at = UtcDateTimeField(default=lambda: datetime.now(UTC), constraints=[SQL("DEFAULT now()")])
    updated_at = UtcDateTimeField(default=lambda: datetime.now(UTC), constraints=[SQL("DEFAULT now()")])

    class Meta:
        table_name = "batched_git_ref_updates_deletions"

    def process(self) -> None:
        """Mark this row as processed, because its ref is gone.

        Raises:
          IllegalEvent: When the row is processed already; nothing is changed.
          RecordChanged: When the row is gone.
        """
        identify(type(self))
        machine.fire(self, "process", {Deletion.updated_at: statement_time(Deletion.updated_at)})


#: States of a row of ``batched_git_ref_updates_deletions``.
machine: Final = StateMachine(
    Deletion.status,
    DeletionStatus,
    {"process": ([DeletionStatus.pending], DeletionStatus.processed)},
)

Deletion.add_index(
    Deletion.index(
        Deletion.project_id,
        Deletion.id,
        where=Deletion.status == DeletionStatus.pending,
        name="index_batched_git_ref_updates_deletions_on_project_id_pending",
    )
)
