"""Actions of a restore: insert archived rows into their table again, and write cleared columns back.

Each action is one statement, which also deletes the rows from the archive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add, and_, or_
from typing import Any, Final

from peewee import CTE, OP, SQL, Case, Column, Expression, IntegerField, Model, Select, Tuple, Value, fn

from housekeeping.database.catalog import ColumnType, escaped, key_of, quoted
from housekeeping.database.errors import sqlstate
from housekeeping.database.queries import CompiledQuery
from housekeeping.sweeps.actions import ADDED, ARCHIVED_AT, CLEARED_COLUMNS, inserted
from housekeeping.sweeps.dependents import Link
from housekeeping.sweeps.keyset import is_true
from housekeeping.sweeps.stage import Batch, BatchResult
from housekeeping.sweeps.table_stage import AS_WRITTEN, TableStage, Write, count_of

#: Column of a CTE: whether the row is restored before the row that it refers to.
_IS_EARLY: Final = "housekeeping_is_early"
#: Maximum difference of `archived_at` within one statement, which adds a microsecond for each row.
_STATEMENT: Final = "interval '1 second'"
_MISSING_ROW: Final = "23503"  # SQLSTATE
#: Counts of restored rows, of rows whose key exists in the table again, and of restored rows whose references were
#: set afterwards.
RESTORED: Final = "restored"
CONFLICTS: Final = "conflicts"
RELINKED: Final = "relinked"


class _WithKeys(Select):
    """Query of an INSERT that also writes identity columns which are GENERATED ALWAYS."""

    def __sql__(self, ctx: Any) -> Any:
        return super().__sql__(ctx.literal("OVERRIDING SYSTEM VALUE "))


@dataclass(frozen=True, slots=True)
class Restore:
    """Insert archived rows into their table and delete them from the archive.

    A row stays in the archive and counts as a conflict if its key, or another unique value, exists in the table, or if
    a trigger leaves it out. It stays and fails if a trigger changes what is restored.

    Attributes:
      source: The table.
      columns: Its columns that the archive has, without those that PostgreSQL computes.
      defers_keys: Whether a unique constraint of the table is DEFERRABLE, so that PostgreSQL refuses ON CONFLICT. A row
        with another unique value that exists in the table then fails.
      links: Links by which rows can depend on each other in a circle. A row that is restored before the one it refers
        to gets NULL, and stays in the archive, marked for `RestoreCleared`. Where NULL is not allowed, one statement
        restores the circle.
    """

    source: type[Model]
    columns: tuple[ColumnType, ...]
    defers_keys: bool
    links: tuple[Link, ...] = ()

    @property
    def counted_as(self) -> Sequence[str]:
        return (RESTORED, CONFLICTS)

    @property
    def relinked(self) -> tuple[str, ...]:
        """The columns that get NULL in a row that is restored before the one it refers to."""
        return tuple(dict.fromkeys(name for each in self.links for name in each.cleared))

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        archive: Any = table.model
        stored = _table(archive)
        names = [column.column_name for column in table.key]
        read = dict.fromkeys((*(each.name for each in self.columns), *names))
        # Of a key that the run has archived several times, the batch restores the newest row.
        key = [Column(stored, name) for name in names if name not in ADDED]
        candidates = (
            archive.select(*(Column(stored, name) for name in read))
            .where(chosen)
            .distinct(*key)
            .order_by(*key, Column(stored, ARCHIVED_AT).desc())
            .cte("candidates", materialized=True)
        )
        before = [candidates]
        if self.relinked:
            is_early = self._is_early(table, batch, candidates).alias(_IS_EARLY)
            columns = [*(Column(candidates, name) for name in read), is_early]
            candidates = Select((candidates,), columns).cte("marked", materialized=True)
            before.append(candidates)
        values = [self._value(candidates, column) for column in self.columns]
        rows = _WithKeys((candidates,), values)
        if self.defers_keys:
            there = (Column(_table(self.source), each.name) == Column(candidates, each.name) for each in key)
            rows = rows.where(~fn.EXISTS(self.source.select(SQL("1")).where(reduce(and_, there))))
        insert = inserted(self.source, [column.name for column in self.columns], rows)
        insert = insert if self.defers_keys else insert.on_conflict_ignore()
        # PostgreSQL may compute a column of the key.
        returned = dict.fromkeys((*(each.name for each in self.columns), *(each.name for each in key)))
        restored = insert.returning(*(Column(_table(self.source), name) for name in returned)).cte("restored")
        compared = Select((restored,), [self._is_exact(restored, candidates).alias(AS_WRITTEN)]).cte("compared")
        same_key = Tuple(*(Column(candidates, each.name) for each in key)).in_(
            Select((restored,), [Column(restored, each.name) for each in key])
        )
        back = Select((candidates,), [Column(candidates, name) for name in names]).where(is_true(same_key))
        gone = archive.delete()
        leaving = [gone.where(chosen & is_true(Tuple(*table.key).in_(back)))]
        if self.relinked:
            early = Column(candidates, _IS_EARLY)
            mark = archive.update({Column(stored, CLEARED_COLUMNS): array_of(self.relinked)})
            leaving = [
                each.where(chosen & is_true(Tuple(*table.key).in_(back.where(condition))))
                for each, condition in ((gone, ~early), (mark, early))
            ]
        return _written(table, chosen, self.counted_as, [*before, restored, compared], restored, leaving)

    def fallback(self, table: TableStage, batch: Batch, error: BaseException) -> BatchResult | None:
        """Restore the row together with the rows that it depends on, which one statement has deleted."""
        links = [each for each in self.links if not each.cleared]
        if not links or sqlstate(error) != _MISSING_ROW:
            return None
        circle = CompiledQuery(self._circle(table, batch, links)).rows()
        return table.apply(replace(batch, only=circle)) if len(circle) > 1 else None

    def _is_early(self, table: TableStage, batch: Batch, candidates: CTE) -> Any:
        """Return SQL for whether a row refers to a row that is restored after it."""
        found: list[Any] = []
        for link in self.links:
            names = ", ".join(f"candidates.{quoted(name)}" for name in link.columns)
            referenced = ", ".join(f"there.{quoted(name)}" for name in link.parent_columns)
            # LIMIT keeps PostgreSQL from reading the whole table.
            there = f"SELECT 1 FROM {link.parent} AS there WHERE ({referenced}) = ({names}) LIMIT 1"  # noqa: S608 - names of the catalog
            is_early: Any = SQL(escaped(f"(({names}) IS NOT NULL AND ({there}) IS NULL)"))
            if link.parent == link.table:
                references = Tuple(*(Column(candidates, name) for name in link.columns))
                of_batch = Select((candidates,), [Column(candidates, name) for name in link.parent_columns])
                times = [Select((candidates,), [edge(Column(candidates, ARCHIVED_AT))]) for edge in (fn.MIN, fn.MAX)]
                later = _waiting_rows(table, batch, link.parent_columns, *times)
                is_early = is_early & ~is_true(references.in_(of_batch)) & is_true(references.in_(later))
            found.append(is_early)
        return reduce(or_, found)

    def _circle(self, table: TableStage, batch: Batch, links: Sequence[Link]) -> Select:
        """Return the query of the positions of a row and of the rows that it depends on by these links."""
        archive: Any = table.model
        assert batch.only is not None
        key = [column.column_name for column in table.key]
        names = list(dict.fromkeys((*key, *(name for each in links for name in (*each.columns, *each.parent_columns)))))
        time = Value(batch.only[0][key.index(ARCHIVED_AT)]).cast("timestamptz")
        row = archive.select(*(Column(_table(archive), name) for name in names)).where(table.is_one_of(batch.only))
        first = row.cte("circle", recursive=True)
        nearby = _waiting_rows(table, batch, names, time, time).cte("nearby", materialized=True)
        refers = [
            Tuple(*(Column(first, name) for name in each.columns))
            == Tuple(*(Column(nearby, name) for name in each.parent_columns))
            for each in links
        ]
        following = Select((nearby,), [Column(nearby, name) for name in names]).join(first, on=reduce(or_, refers))
        circle = first.union(following)
        columns = [(each, Column(circle, each.column_name)) for each in table.key]
        positions = [each if isinstance(field, IntegerField) else each.cast("text") for field, each in columns]
        return Select((circle,), positions).with_cte(nearby, circle)

    def _is_exact(self, restored: Any, candidates: Any) -> Any:
        """Return SQL for whether a restored row has the archived values, except for times, which a trigger may set."""
        compared = [column for column in self.columns if not column.sql_type.startswith(("timestamp", "date", "time"))]
        archived = [self._value(candidates, column).cast(column.sql_type) for column in compared]
        texts = Select((candidates,), [fn.ROW(*archived).cast("text")])
        return is_true(fn.ROW(*(Column(restored, column.name) for column in compared)).cast("text").in_(texts))

    def _value(self, candidates: Any, column: ColumnType) -> Any:
        """Return a column's archived value; the default of a column that was added after the row was archived."""
        archived = Column(candidates, column.name)
        if column.name in self.relinked:
            return Case(None, [(Column(candidates, _IS_EARLY), SQL("NULL"))], archived)
        if not column.not_null or column.default is None:
            return archived
        return fn.COALESCE(archived, SQL(escaped(column.default)))


@dataclass(frozen=True, slots=True)
class RestoreCleared:
    """Write archived values back to columns that a cascade has cleared, or that `Restore` has left NULL.

    The archived rows are then deleted. One stays and counts as a conflict if the row in the table is missing, or has
    other values by now.

    Attributes:
      source: The table.
      columns: The columns.
      defaults: Whether the columns were set to their default instead of NULL; other values are then not recognized.
      restored: Name of the count of rows whose columns were written.
    """

    source: type[Model]
    columns: tuple[str, ...]
    defaults: bool
    restored: str = RESTORED

    @property
    def counted_as(self) -> Sequence[str]:
        return (self.restored, CONFLICTS)

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        archive: Any = table.model
        source: Any = self.source
        stored, there = _table(archive), _table(source)
        key = [column.column_name for column in key_of(source)]
        names = [column.column_name for column in table.key]
        candidates = (
            archive.select(*(Column(stored, name) for name in dict.fromkeys((*names, *self.columns))))
            .where(chosen)
            .distinct(*(Column(stored, name) for name in key))
            .order_by(*(Column(stored, name) for name in key), Column(stored, ARCHIVED_AT).desc())
            .cte("candidates", materialized=True)
        )
        conditions = [Column(there, name) == Column(candidates, name) for name in key]
        conditions += [] if self.defaults else [Column(there, name).is_null() for name in self.columns]
        update = source.update({Column(there, name): Column(candidates, name) for name in self.columns})
        written = update.from_(candidates).where(reduce(and_, conditions))
        restored = written.returning(*(Column(there, name) for name in key)).cte("restored")
        same_key = Tuple(*(Column(candidates, name) for name in key)).in_(
            Select((restored,), [Column(restored, name) for name in key])
        )
        back = Select((candidates,), [Column(candidates, name) for name in names]).where(is_true(same_key))
        leaving = [archive.delete().where(chosen & is_true(Tuple(*table.key).in_(back)))]
        return _written(table, chosen, self.counted_as, [candidates, restored], restored, leaving)


def _written(
    table: TableStage,
    chosen: Expression,
    counted_as: Sequence[str],
    before: Sequence[CTE],
    restored: CTE,
    leaving: Sequence[Any],
) -> Write:
    """Return the part of a statement that removes each restored row from the rows to restore."""
    archive: Any = table.model
    ctes = [each.returning(*table.key).cte(f"left_{number}") for number, each in enumerate(leaving)]
    keys = [Select((cte,), [Column(cte, column.column_name) for column in table.key]) for cte in ctes]
    removed = reduce(add, keys).cte("removed")
    done = Select((removed,), [Column(removed, column.column_name) for column in table.key])
    kept = archive.select(SQL("1")).where(chosen & Tuple(*table.key).not_in(done)).cte("kept")
    holds = Expression(count_of(restored), OP.EQ, count_of(removed))
    return Write([removed, kept], counted_as, before=[*before, *ctes], holds=holds)


def _waiting_rows(table: TableStage, batch: Batch, names: Iterable[str], oldest: Any, newest: Any) -> Any:
    """Return a query of columns of the rows to restore that were archived between two times or shortly before."""
    archive: Any = table.model
    stored = _table(archive)
    times = Column(stored, ARCHIVED_AT).between(Expression(oldest, OP.SUB, SQL(_STATEMENT)), newest)
    return archive.select(*(Column(stored, name) for name in names)).where(table.stale(batch.now) & times)


def _table(model: type[Model]) -> Any:
    meta: Any = model._meta
    return meta.table


def array_of(names: Sequence[str]) -> Any:
    """Return the array of these names in SQL."""
    return fn.STRING_TO_ARRAY("\n".join(names), "\n")
