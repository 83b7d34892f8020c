"""Which rows a batch takes: by keyset, oldest first, those locked elsewhere left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from peewee import CTE, Expression, ModelSelect, Select, Tuple

if TYPE_CHECKING:
    from housekeeping.sweeps.declaration import Sweep

#: The values of the order columns of one row, as Python values.
Position = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step of a walk, not yet taken.

    Attributes:
      sweep: What is being walked.
      now: The time the run began.
      after: Where the step before ended; null: the front.
      only: Just these rows (by the values of `order`), for finding the one that cannot be settled.
    """

    sweep: Sweep
    now: datetime
    after: Position | None
    only: Sequence[Position] | None = None

    def stale(self) -> Expression:
        """The sweep's predicate, for repeating it where rows are changed: compare-and-set."""
        return self.sweep.stale(self.now)

    def rows(self) -> ModelSelect[Any]:
        """The order columns of the rows this step takes, unlocked."""
        order = self.sweep.order
        query = self.sweep.model.select(*order).where(self.stale())
        if self.only is not None:
            return query.where(_among(order, self.only)).order_by(*order)
        if self.after is not None:
            query = query.where(Tuple(*order) > Tuple(*self.after))
        return query.order_by(*order).limit(self.sweep.batch_size)

    def picked(self) -> CTE:
        """The rows this step takes, locked, as a set that is fixed once and before anything else.

        Materialized: as a mere subquery of the statement that changes rows, PostgreSQL may run
        ``SELECT ... LIMIT`` once for each row it looks at, and change more rows than the batch has.
        """
        return self.rows().for_update(skip_locked=True).cte("picked", materialized=True)

    def among_picked(self, picked: CTE) -> Expression:
        """That a row of the table is one of the picked."""
        key = self.sweep.key
        columns = [getattr(picked.c, field.column_name) for field in key]
        chosen = Select((picked,), columns)
        among: Expression = key[0].in_(chosen) if len(key) == 1 else Tuple(*key).in_(chosen)
        return among


def _among(order: tuple[Any, ...], positions: Sequence[Position]) -> Expression:
    among: Expression = Tuple(*order).in_([Tuple(*position) for position in positions])
    return among
