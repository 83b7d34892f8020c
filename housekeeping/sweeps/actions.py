"""What can be done with the stale rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from peewee import JOIN, Select

from housekeeping.foundation.db import database

if TYPE_CHECKING:
    from housekeeping.sweeps.batches import Batch, Position


@dataclass(frozen=True, slots=True)
class Settled:
    """What one statement did.

    Attributes:
      picked: The order columns of every row the batch took, in order.
      changed: The same of those that were really changed.
      counts: What to add to the run's counts.
    """

    picked: Sequence[Position]
    changed: Sequence[Position]
    counts: dict[str, int] = field(default_factory=dict)


class Action(Protocol):
    """What a sweep does with a batch; everything in the caller's transaction, nothing outside of the database."""

    @property
    def counted_as(self) -> Sequence[str]:
        """The names of its counts, in the order they are shown."""

    def settle(self, batch: Batch) -> Settled:
        """Do it, in as few statements as can be."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the rows, in one statement a batch.

    Attributes:
      rows_counted_as: The name of the count of deleted rows.
    """

    rows_counted_as: str = "deleted_rows"

    @property
    def counted_as(self) -> Sequence[str]:
        return (self.rows_counted_as,)

    def settle(self, batch: Batch) -> Settled:
        sweep = batch.sweep
        picked = batch.picked()
        # The predicate once more: what is deleted is stale at the moment it is deleted.
        delete = sweep.model.delete().where(batch.among_picked(picked) & batch.stale()).returning(*sweep.key)
        deleted = delete.cte("deleted")
        same_row = [getattr(deleted.c, key.column_name) == getattr(picked.c, key.column_name) for key in sweep.key]
        columns = [getattr(picked.c, column.column_name) for column in sweep.order]
        query: Any = (
            Select((picked,), (*columns, getattr(deleted.c, sweep.key[0].column_name).is_null(False)))
            .join(deleted, JOIN.LEFT_OUTER, on=_all(same_row))
            .order_by(*columns)
            .with_cte(picked, deleted)
            .tuples()
        )
        rows = list(query.execute(database))
        changed = [row[:-1] for row in rows if row[-1]]
        return Settled([row[:-1] for row in rows], changed, {self.rows_counted_as: len(changed)})


def _all(conditions: list[Any]) -> Any:
    result = conditions[0]
    for condition in conditions[1:]:
        result &= condition
    return result
