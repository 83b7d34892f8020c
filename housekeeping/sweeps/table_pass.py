"""A pass through a table: keyset order, oldest first, rows locked elsewhere left out, one statement a batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from blinker import NamedSignal
from peewee import CTE, JOIN, SQL, Expression, Field, Model, ModelSelect, Select, Tuple, fn

from housekeeping.foundation import events
from housekeeping.foundation.db import database
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.sweeps.actions import Action
from housekeeping.sweeps.passes import Backlog, PassPlan, Position, Settled, Step, as_cursor

logger = named_logger(__name__)

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
        them may be null in a stale row.
      action: What is done with the stale rows of a batch.
      columns: Further columns to read, by the key a record has for them, for events and log lines.
      sends: The event sent with the changed records of each batch, and which keys of the record it carries.
      line: The log line for each changed record; null: none.
    """

    name: str
    stale: Any
    order: tuple[Any, ...]
    action: Action
    batch_size: int = 100
    columns: Mapping[str, Any] = field(default_factory=dict)
    sends: tuple[NamedSignal, tuple[str, ...]] | None = None
    line: RecordLine | None = None

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
            among = Tuple(*self.order).in_([Tuple(*position) for position in step.only])
            return query.where(among).order_by(*self.order)
        if step.after is not None:
            query = query.where(Tuple(*self.order) > Tuple(*step.after))
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
        among: Expression = self.key[0].in_(chosen) if len(self.key) == 1 else Tuple(*self.key).in_(chosen)
        return among

    def take(self, step: Step) -> None:
        """Nothing: the rows are read by the statement that changes them."""

    def settle(self, step: Step, taken: None = None) -> Settled:
        """Pick, lock and change the rows in one statement, which also says which they were."""
        picked = self.picked(step)
        # What is changed is stale at the moment it is changed: the predicate once more, as compare-and-set.
        write = self.action.write(self, step, self.among(picked) & self.stale(step.now))
        changed, *others = write.ctes
        same_row = [getattr(changed.c, key.column_name) == getattr(picked.c, key.column_name) for key in self.key]
        read = [getattr(picked.c, column.column_name) for column in (*self.order, *self.columns.values())]
        flag = getattr(changed.c, self.key[0].column_name).is_null(False)
        totals = [Select((other,), [fn.COUNT(SQL("*"))]) for other in others]
        query: Any = (
            Select((picked,), (*read, flag, *totals))
            .join(changed, JOIN.LEFT_OUTER, on=_all(same_row))
            .order_by(*read[: len(self.order)])
            .with_cte(picked, *write.ctes)
            .tuples()
        )
        found = list(query.execute(database))
        width = len(read)
        rows = [self._record(row) for row in found if row[width]]
        counts = {write.counts[0]: len(rows)}
        counts |= dict(zip(write.counts[1:], found[0][width + 1 :] if found else [0] * len(others), strict=True))
        position = tuple(found[-1][: len(self.order)]) if found else step.after
        return Settled(counts, position, len(found) < self.batch_size, rows=rows)

    def committed(self, step: Step, settled: Settled) -> None:
        if self.line is not None:
            for row in settled.rows:
                values = {name: row[key] for name, key in self.line.fields.items()}
                logger.log(self.line.level, self.line.event, **values, **self.line.constants)
        if self.sends is not None:
            event, keys = self.sends
            rows = [{key: row[key] for key in keys} for row in settled.rows]
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

    def _edge(self, now: datetime, order: tuple[Any, ...]) -> Any:
        first: Any = self.model.select(self.order[0]).where(self.stale(now)).order_by(*order).limit(1).tuples()
        return next((value for (value,) in first), None)

    def _record(self, row: tuple[Any, ...]) -> dict[str, Any]:
        named = {column.name: value for column, value in zip(self.order, row, strict=False)}
        further = row[len(self.order) : len(self.order) + len(self.columns)]
        return named | dict(zip(self.columns, further, strict=True))


def _all(conditions: list[Any]) -> Any:
    result = conditions[0]
    for condition in conditions[1:]:
        result &= condition
    return result
