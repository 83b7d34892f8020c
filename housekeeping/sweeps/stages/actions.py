"""Actions on the stale rows of a batch. Each adds its changes to the statement that picks the rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, Self

from peewee import CTE, Expression, Model, fn

from housekeeping.core.errors import DeclarationError
from housekeeping.database.state_machines import StateMachine
from housekeeping.database.times import STATEMENT_TIME, StatementTime, all_as_stored
from housekeeping.sweeps.checks.field_types import check_types
from housekeeping.sweeps.stages.archive import (
    ARCHIVED_ROWS,
    archive_model,
    columns_of_table,
    declared_columns,
    moved,
    parsed_name,
)
from housekeeping.sweeps.stages.stage import Batch, BatchResult

if TYPE_CHECKING:
    from housekeeping.sweeps.stages.table_stage import TableStage


@dataclass(frozen=True, slots=True)
class Write:
    """The part of a batch's statement that changes rows.

    Attributes:
      ctes: Data-modifying CTEs. The first changes the picked rows and returns their keys; others change dependent rows.
      counts: Name of the row count of each CTE.
      before: Further CTEs that these refer to.
      holds: Condition that must be true after the changes; otherwise the batch is rolled back. With a condition, picked
        rows may stay unchanged, because another session works on them. Without one, such a row counts as failed.
      requires: Condition that must be true after the changes; otherwise the batch is rolled back and the run fails.
        For a condition that no single row can break.
    """

    ctes: Sequence[CTE]
    counts: Sequence[str]
    before: Sequence[CTE] = ()
    holds: Expression | None = None
    requires: Expression | None = None


class Action(Protocol):
    """Change that a sweep makes to the stale rows of a batch."""

    @property
    def counted_as(self) -> Sequence[str]:
        """Names of the row counts of the action, in display order."""

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        """Return the part of the statement that changes the rows matching `chosen`: picked, and still stale."""

    def fallback(self, table: TableStage, batch: Batch, error: BaseException) -> BatchResult | None:
        """Process the single row of `batch.only` in another way after this error; return None if there is no other
        way."""


def allowed_by(action: Any) -> Expression | None:
    """Return the condition for the stale rows that the action can change; None if it can change all of them."""
    if isinstance(action, Transition):
        allowed: Expression = action.machine.field.in_(action.machine.sources(action.event))
        return allowed
    return allowed_by(action.then) if hasattr(action, "then") else None


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the rows, or move them to an archive.

    ::

        action=Delete(archive_to="archive.sessions", archive_keep=timedelta(days=90))

    Attributes:
      rows_counted_as: The name of the count of deleted rows.
      archive_to: Table that takes the rows, by its name or as a peewee model. The same statement deletes and inserts
        them. The archive has the table's columns, ``archived_at`` and ``archived_by_run``.
      archive_keep: How long rows stay in the archive. The sweep ``<name>.archive`` then deletes them. None keeps them
        for ever.
    """

    rows_counted_as: str = "deleted_rows"
    archive_to: str | type[Model] | None = None
    archive_keep: timedelta | None = None
    #: The columns to move, once they were read from the table.
    _columns: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_types("Delete", self)
        if isinstance(self.archive_to, str):
            parsed_name(self.archive_to)
        if self.archive_keep is not None and self.archive_to is None:
            raise DeclarationError('Delete: archive_keep without an archive; write archive_to="archive.sessions"')
        if self.archive_keep is not None and self.archive_keep <= timedelta():
            raise DeclarationError(
                f"Delete: archive_keep is {self.archive_keep!r}, so no row would stay in the archive; write how long "
                "rows stay there, such as timedelta(days=90)"
            )

    @property
    def counted_as(self) -> Sequence[str]:
        return (self.rows_counted_as,) if self.archive_to is None else (self.rows_counted_as, ARCHIVED_ROWS)

    def on_real_columns(self, model: type[Model]) -> Self:
        """Return the action that moves all columns which the table has now.

        Raises:
          peewee.PeeweeException: When the database cannot be asked.
        """
        if self.archive_to is None:
            return self
        real = copy.copy(self)
        object.__setattr__(real, "_columns", columns_of_table(model))
        return real

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        if self.archive_to is None:
            delete: Any = table.model.delete().where(chosen).returning(*table.key)
            return Write([delete.cte("deleted")], self.counted_as)
        columns = self._columns or declared_columns(table.model)
        archive = archive_model(table.model, self.archive_to)
        ctes, is_whole = moved(table, archive, chosen, columns, batch.run_id)
        return Write(ctes, self.counted_as, requires=is_whole)

    def fallback(self, table: TableStage, batch: Batch, error: BaseException) -> BatchResult | None:
        return None


def archiving(action: Any) -> Delete | None:
    """Return the part of an action that moves rows to an archive; None if it does not."""
    deletion = getattr(action, "then", action)
    return deletion if isinstance(deletion, Delete) and deletion.archive_to is not None else None


@dataclass(frozen=True, slots=True)
class Transition:
    """Fire an event of the table's state machine on the rows. The machine defines the allowed sources and the target.

    Attributes:
      rows_counted_as: The name of the count of changed rows.
      changes: Returns further columns to set, with their values, given the time of the change. The time is an SQL
        expression, not a `datetime`: use it unchanged or add a `timedelta`.
    """

    machine: StateMachine
    event: str
    rows_counted_as: str = "moved_rows"
    changes: Callable[[StatementTime], Mapping[Any, Any]] = lambda now: {}

    def __post_init__(self) -> None:
        check_types("Transition", self)
        events = self.machine.events
        if self.event not in events:
            raise DeclarationError(
                f"Transition: the machine has no event {self.event!r}; write {' or '.join(map(repr, events))}"
            )

    @property
    def counted_as(self) -> Sequence[str]:
        return (self.rows_counted_as,)

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        state = self.machine.field
        changes = all_as_stored(table.model, self.changes(STATEMENT_TIME))
        update: Any = (
            table.model.update({state: self.machine.target(self.event), **changes})
            # COALESCE keeps PostgreSQL from using this condition for an index (see `batch_statement.changes`).
            .where(chosen & fn.COALESCE(state.in_(self.machine.sources(self.event)), False))
            .returning(*table.key)
        )
        return Write([update.cte("moved")], self.counted_as)

    def fallback(self, table: TableStage, batch: Batch, error: BaseException) -> BatchResult | None:
        return None
