"""A pass through a table: keyset order, oldest first, rows locked elsewhere left out, one statement a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from blinker import NamedSignal
from peewee import CTE, SQL, Expression, Field, Model, ModelSelect, Query, Select, Tuple, Value, fn

from housekeeping.foundation import events
from housekeeping.foundation.db import database
from housekeeping.foundation.errors import DeclarationError
from housekeeping.foundation.logs import log_each
from housekeeping.foundation.prepared import Place, Prepared, Statements
from housekeeping.sweeps.actions import Action, Write
from housekeeping.sweeps.passes import Backlog, PassPlan, Position, Reading, Settled, Step, as_cursor, from_cursor

_SAMPLES: Final = 5


@dataclass(frozen=True, slots=True)
class RecordLine:
    """A log line for each record that was changed.

    Attributes:
      event: Its text.
      fields: Log field -> key of the record (see `TablePass.columns`).
      constants: Log field -> value.
      level: One of logging's.
    """

    event: str
    fields: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    level: int = logging.INFO


@dataclass(frozen=True, kw_only=True)
class TablePass:
    """One walk through a table.

    Attributes:
      stale: The one predicate, given the time the run began; run, plan and backlog all use it.
      order: The columns the walk follows, ending with the primary key, so that it can go on after any row. None of
        them may be null in a stale row, but for those of `nullable`.
      action: What is done with the stale rows of a batch.
      columns: Further columns to read, by the key a record has for them, for events and log lines.
      sends: The event sent with the changed records of each batch, and which keys of the record it carries; a mapping
        where the event calls them otherwise (event's key -> record's).
      line: The log line for each changed record; null: none.
      nullable: Columns of the order, but the first, that may be null in a stale row; such rows come last.
    """

    name: str
    stale: Any
    order: tuple[Any, ...]
    action: Action
    batch_size: int = 100
    columns: Mapping[str, Any] = field(default_factory=dict)
    sends: tuple[NamedSignal, tuple[str, ...] | Mapping[str, str]] | None = None
    line: RecordLine | None = None
    nullable: tuple[Any, ...] = ()
    statements: Statements = field(default_factory=Statements, init=False, repr=False, compare=False)

    @property
    def model(self) -> type[Model]:
        """The table."""
        model: type[Model] = self.order[0].model
        return model

    @property
    def key(self) -> tuple[Field, ...]:
        """The columns that identify a row."""
        meta: Any = self.model._meta
        return tuple(meta.get_primary_keys())

    def rows(self, step: Step) -> ModelSelect[Any]:
        """The rows a step takes, by the order columns, then the further ones; unlocked."""
        query = self.model.select(*self.order, *self.columns.values()).where(self.stale(step.now))
        if step.only is not None:
            return query.where(self.is_one_of(step.only)).order_by(*self.order)
        if step.after is not None:
            query = query.where(self._comes_after(step.after))
        return query.order_by(*self.order).limit(self.batch_size)

    def picked(self, step: Step) -> CTE:
        """The rows a step takes, locked, as a set that is fixed once and before anything else.

        Materialized: as a mere subquery of the statement that changes rows, PostgreSQL may run
        ``SELECT ... LIMIT`` once for each row it looks at, and change more rows than the batch has.
        """
        return self.rows(step).for_update(skip_locked=True).cte("picked", materialized=True)

    def among(self, picked: CTE) -> Expression:
        """That a row of the table is one of the picked."""
        chosen = Select((picked,), [getattr(picked.c, column.column_name) for column in self.key])
        if len(self.key) > 1:
            several: Expression = Tuple(*self.key).in_(chosen)
            return several
        # An array, and not a join, for which PostgreSQL may choose to read the whole table.
        single: Expression = self.key[0] == fn.ANY(fn.ARRAY(chosen))
        return single

    def take(self, step: Step) -> Any:
        """Nothing: the rows are read by the statement that changes them."""

    def settle(self, step: Step, taken: Any = None) -> Settled:
        """Pick, lock and change the rows in one statement; it also says which they were, where somebody is told."""
        told = self.somebody_is_told()
        rows = self.carried_out(step, ("settle", told), lambda step: self._statement(step, told))
        return self._each(step, rows) if told else self._in_all(step, rows)

    def carried_out(self, step: Step, form: Hashable, make: Callable[[Step], Query]) -> list[tuple[Any, ...]]:
        """The rows of a statement of a step, which is put together once a run.

        Parameters:
          form: What else it depends on than the run and the place.
          make: Puts it together; the place of the step that it is given is one to be filled in.
        """
        if step.only is not None:
            return Prepared(make(step)).rows()
        after = None if step.after is None else self._bound(step.after)
        shape = None if after is None else tuple(value is None for value in after)
        blank = None if after is None else tuple(v if v is None else Place(n) for n, v in enumerate(after))
        statement = self.statements.of(self.purpose(step), (form, shape), lambda: make(replace(step, after=blank)))
        return statement.rows(*after or ())

    def purpose(self, step: Step) -> Hashable:
        """What a statement that is put together once is made for: this run."""
        return step.run_id, step.now

    def _statement(self, step: Step, told: bool) -> Query:
        picked = self.picked(step)
        # What is changed is stale at the moment it is changed: the predicate once more, as compare-and-set. COALESCE
        # keeps it from choosing the index: with old statistics, all that is stale would be looked through for each row.
        still_stale = fn.COALESCE(self.stale(step.now), False)
        write = self.action.write(self, step, self.among(picked) & still_stale)
        self._refuse_other_counts(write)
        changed, *others = write.ctes
        totals = [Select((other,), [fn.COUNT(SQL("*"))]) for other in others]
        order = [getattr(picked.c, column.column_name) for column in self.order]
        if not told:
            numbers = [Select((each,), [fn.COUNT(SQL("*"))]) for each in (picked, changed)]
            last = Select((picked,), (*order, *numbers, *totals)).order_by(*(column.desc() for column in order))
            return last.limit(1).with_cte(picked, *write.ctes)
        read = [*order, *(getattr(picked.c, column.column_name) for column in self.columns.values())]
        key = [getattr(picked.c, column.column_name) for column in self.key]
        done = Select((changed,), [getattr(changed.c, column.column_name) for column in self.key])
        flag = key[0].in_(done) if len(key) == 1 else Tuple(*key).in_(done)
        return Select((picked,), (*read, flag, *totals)).order_by(*order).with_cte(picked, *write.ctes)

    def _each(self, step: Step, rows: list[tuple[Any, ...]]) -> Settled:
        width = len(self.order) + len(self.columns)
        columns = (*self.order, *self.columns.values())
        # Column by column, because to find out for each value how it is read takes as long as a log line.
        values = zip(columns, zip(*rows, strict=True), strict=False)
        read = list(zip(*([column.python_value(each) for each in found] for column, found in values), strict=True))
        changed = [self.record(each) for each, row in zip(read, rows, strict=True) if row[width]]
        return Settled(
            self._counted((len(changed), *rows[0][width + 1 :]) if rows else ()),
            read[-1][: len(self.order)] if read else step.after,
            len(rows) < self.batch_size,
            rows=changed,
        )

    def _in_all(self, step: Step, rows: list[tuple[Any, ...]]) -> Settled:
        if not rows:
            return Settled(self._counted(()), step.after)
        width = len(self.order)
        picked, *counts = rows[0][width:]
        position = tuple(column.python_value(value) for column, value in zip(self.order, rows[0], strict=False))
        return Settled(self._counted(counts), position, picked < self.batch_size)

    def _counted(self, numbers: Sequence[int]) -> dict[str, int]:
        """The counts of a step, nought for those of which its statement has no number."""
        names = self.action.counted_as
        return {**dict.fromkeys(names, 0), **dict(zip(names, numbers, strict=False))}

    def _refuse_other_counts(self, write: Write) -> None:
        names = tuple(self.action.counted_as)[: len(write.ctes)]
        if tuple(write.counts) != names or len(names) != len(write.ctes):
            raise DeclarationError(
                f"{self.name}: the counts of its action's Write are {', '.join(write.counts) or 'none'}; they should "
                f"be one for each statement, as counted_as begins: {', '.join(names)}"
            )

    def somebody_is_told(self) -> bool:
        """Whether the records themselves are wanted: by a line for each, or by a subscriber of the event."""
        written = self.line is not None and logging.getLogger(__name__).isEnabledFor(self.line.level)
        return written or (self.sends is not None and bool(self.sends[0].receivers))

    def committed(self, step: Step, settled: Settled) -> None:
        if self.line is not None:
            fields, constants = self.line.fields.items(), self.line.constants
            each = [{**{name: row[key] for name, key in fields}, **constants} for row in settled.rows]
            log_each(__name__, self.line.level, self.line.event, each)
        if self.sends is not None and self.sends[0].receivers:
            event, keys = self.sends
            named = keys if isinstance(keys, Mapping) else dict(zip(keys, keys, strict=True))
            rows = [{name: row[key] for name, key in named.items()} for row in settled.rows]
            events.send(event, rows, worker=step.worker, run_id=step.run_id)

    def positions(self, step: Step) -> list[Position]:
        found: Any = self.rows(step).for_update(skip_locked=True).tuples()
        return [tuple(row[: len(self.order)]) for row in found]

    def rescue(self, step: Step, error: BaseException) -> Settled | None:
        return self.action.rescue(self, step, error)

    def describe(self, position: Position) -> dict[str, Any]:
        names = [column.name for column in self.order]
        return dict(zip(names, as_cursor(position) or [], strict=True))

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        stale = self.model.select(SQL("1")).where(self.stale(now)).limit(limit + 1)
        query: Any = stale.select_from(fn.COUNT(SQL("1")))
        rows: int = next(iter(query.tuples().execute(database)))[0]
        return Backlog(min(rows, limit), rows <= limit)

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        return self._edge(now, self.order)

    def readings(self, now: datetime) -> list[Reading]:
        walk = self.rows(Step("", None, now)).for_update(skip_locked=True)
        return [Reading(f"the walk through {self.name}", walk, self.model)]

    def plan(self, now: datetime, limit: int, argument: Any = None) -> PassPlan:
        stale = self.backlog(now, limit)
        samples: Any = self.model.select(*self.order).where(self.stale(now)).order_by(*self.order).limit(_SAMPLES)
        return PassPlan(
            self.name,
            stale,
            {self.action.counted_as[0]: stale.rows},
            self.oldest(now),
            self._edge(now, tuple(column.desc() for column in self.order)),
            [self.describe(row) for row in samples.tuples()],
        )

    def is_one_of(self, positions: Sequence[Position]) -> Expression:
        """That a row of the table is the one at one of these positions."""
        keys = [position[-len(self.key) :] for position in positions]
        if len(self.key) == 1:
            found: Expression = self.key[0].in_([key for (key,) in keys])
        else:
            found = Tuple(*self.key).in_([Tuple(*key) for key in keys])
        return found

    def _comes_after(self, position: Position) -> Expression:
        values = self._bound(position)
        if not self.nullable:
            after: Expression = Tuple(*self.order) > Tuple(*values)
            return after
        values = tuple(v if v is None or isinstance(v, Place) else Value(v, converter=False) for v in values)
        # A comparison of whole rows knows nothing of nulls. The first column once more, for the index.
        later: Any = None
        for column, value in reversed(list(zip(self.order, values, strict=True))):
            same = column.is_null() if value is None else column == value
            later = same & later if later is not None else None
            if value is not None:
                greater = column > value
                if any(column is each for each in self.nullable):
                    greater |= column.is_null()
                later = greater if later is None else greater | later
        after = (self.order[0] >= values[0]) & later
        return after

    def _bound(self, position: Position) -> tuple[Any, ...]:
        """A position as the database takes it; of one that is yet to be filled in, the places."""
        return tuple(
            value if isinstance(value, Place) else column.db_value(from_cursor(column, value))
            for column, value in zip(self.order, position, strict=True)
        )

    def _edge(self, now: datetime, order: tuple[Any, ...]) -> Any:
        first: Any = self.model.select(self.order[0]).where(self.stale(now)).order_by(*order).limit(1).tuples()
        return next((value for (value,) in first), None)

    def read(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """A row as the driver has it, each value as its column reads it."""
        return tuple(
            column.python_value(value)
            for column, value in zip((*self.order, *self.columns.values()), row, strict=False)
        )

    def record(self, row: tuple[Any, ...]) -> dict[str, Any]:
        """A row of `rows` as events and log lines know it."""
        named = {column.name: value for column, value in zip(self.order, row, strict=False)}
        further = row[len(self.order) : len(self.order) + len(self.columns)]
        return named | dict(zip(self.columns, further, strict=True))
