"""Action that moves rows from an archive back to their table, in one statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from peewee import OP, SQL, Column, Expression, Model, Select, Tuple, fn

from housekeeping.database.column_types import ColumnType
from housekeeping.sweeps.stages.actions import Write
from housekeeping.sweeps.stages.archive import ARCHIVED_AT, inserted
from housekeeping.sweeps.stages.batch_statement import count_of
from housekeeping.sweeps.stages.stage import Batch, BatchResult

if TYPE_CHECKING:
    from housekeeping.sweeps.stages.table_stage import TableStage

#: Counts of rows that are back in their table, and of rows whose key exists there again.
RESTORED: Final = "restored"
CONFLICTS: Final = "conflicts"


class _WithKeys(Select):
    """Query of an INSERT that also writes identity columns which are GENERATED ALWAYS."""

    def __sql__(self, ctx: Any) -> Any:
        return super().__sql__(ctx.literal("OVERRIDING SYSTEM VALUE "))


@dataclass(frozen=True, slots=True)
class Restore:
    """Insert archived rows into their table and delete them from the archive.

    A row stays in the archive and counts as a conflict if its key, or another unique value, exists in the table.

    Attributes:
      source: The table.
      columns: Its columns that the archive has, without those that PostgreSQL computes.
    """

    source: type[Model]
    columns: tuple[ColumnType, ...]

    @property
    def counted_as(self) -> Sequence[str]:
        return (RESTORED, CONFLICTS)

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        archive: Any = table.model
        stored = archive._meta.table
        names = [column.column_name for column in table.key]
        # Of a key that the run has archived several times, the batch restores the newest row.
        key = [Column(stored, name) for name in names if name in [column.name for column in self.columns]]
        others = [Column(stored, name) for name in names if name not in [column.name for column in self.columns]]
        columns = [Column(stored, column.name) for column in self.columns]
        candidates = (
            archive.select(*columns, *others)
            .where(chosen)
            .distinct(*key)
            .order_by(*key, Column(stored, ARCHIVED_AT).desc())
            .cte("candidates", materialized=True)
        )
        values = [self._value(candidates, column) for column in self.columns]
        rows = _WithKeys((candidates,), values)
        insert = inserted(self.source, [column.name for column in self.columns], rows).on_conflict_ignore()
        restored = insert.returning(*(Column(_table(self.source), each.name) for each in key)).cte("restored")
        same_key = Tuple(*(Column(candidates, each.name) for each in key)).in_(
            Select((restored,), [Column(restored, each.name) for each in key])
        )
        back = Select((candidates,), [Column(candidates, name) for name in names]).where(_hashed(same_key))
        gone = chosen & _hashed(Tuple(*table.key).in_(back))
        removed = archive.delete().where(gone).returning(*table.key).cte("removed")
        done = Select((removed,), [Column(removed, name) for name in names])
        kept = archive.select(SQL("1")).where(chosen & Tuple(*table.key).not_in(done)).cte("kept")
        holds = Expression(count_of(restored), OP.EQ, count_of(removed))
        return Write([removed, kept], self.counted_as, before=(candidates, restored), holds=holds)

    def fallback(self, table: TableStage, batch: Batch, error: BaseException) -> BatchResult | None:
        return None

    def _value(self, candidates: Any, column: ColumnType) -> Any:
        """Return a column's archived value; the default of a column that was added after the row was archived."""
        archived = Column(candidates, column.name)
        if not column.not_null or column.default is None:
            return archived
        return fn.COALESCE(archived, SQL(column.default.replace("%", "%%")))


def _hashed(condition: Expression) -> Any:
    """Return the condition in a form that PostgreSQL does not turn into a join.

    It expects few rows from a CTE, and would compare each row of the batch with each other one.
    """
    return fn.COALESCE(condition, False)


def _table(model: type[Model]) -> Any:
    meta: Any = model._meta
    return meta.table
