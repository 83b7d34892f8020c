"""Stage of a sweep that processes one table: in keyset order, oldest first, one statement a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Self, TypeVar

from blinker import NamedSignal
from peewee import (
    CTE,
    SQL,
    Expression,
    Field,
    IntegerField,
    Model,
    ModelSelect,
    Query,
    fn,
)

from housekeeping.core import events
from housekeeping.core.telemetry.logs import log_rows
from housekeeping.database.catalog import is_absent, remove_absent_fields
from housekeeping.database.compiled_query import CompiledQuery, Parameter, QueryCache
from housekeeping.database.connection import database
from housekeeping.database.primary_key import key_among
from housekeeping.sweeps.stages.actions import Action, archiving
from housekeeping.sweeps.stages.archive import ARCHIVED_ROWS
from housekeeping.sweeps.stages.batch_statement import (
    LOCKED_KEYS,
    checked_result,
    checked_statement,
    key_is_among,
    lock_statement,
    text_of,
)
from housekeeping.sweeps.stages.hold import ExceptHeld, Hold
from housekeeping.sweeps.stages.keyset import comes_after, comes_until, has_key, readable
from housekeeping.sweeps.stages.nulls import may_be_null
from housekeeping.sweeps.stages.row_log import RowLog
from housekeeping.sweeps.stages.stage import (
    Announcement,
    Backlog,
    Batch,
    BatchResult,
    ExplainQuery,
    Position,
    StagePlan,
)

Q = TypeVar("Q")

_SAMPLES: Final = 5
#: The position before the rows whose first order column is NULL; they come last.
_BEFORE_NULLS: Final[Position] = (None,)


def named_keys(keys: tuple[str, ...] | Mapping[str, str]) -> Mapping[str, str]:
    """Return the keys of an event's row, each with the key of the record that it is copied from."""
    return keys if isinstance(keys, Mapping) else dict(zip(keys, keys, strict=True))


@dataclass(frozen=True, kw_only=True)
class TableStage:
    """Stage that processes one table. Rows that another transaction has locked are skipped.

    Attributes:
      stale: The predicate, given the time at which the run began. Run, plan and backlog all use it.
      order: Columns that order the rows, ending with those of the primary key, so that a batch can continue after any
        row. Rows with NULL in one of them come last.
      action: What is done with the stale rows of a batch.
      columns: Further columns to read for events and log lines, by their key in a row. Columns in the model's
        ``optional_fields`` are left out if the table lacks them.
      event: The event announced with the changed rows of each batch, and the keys of the row that it carries; a mapping
        if the event has other names for them (event's key -> row's key).
      row_log: The log line of each changed row.
      locks_first: Whether the rows are locked by a statement of their own, so that the one that changes them sees
        everything that was committed before the locks. Only for a table whose key is one integer.
      hold: Returns the condition of rows that stay although they are stale (see `held_condition`). `stale` then
        excludes them.
    """

    name: str
    stale: Any
    order: tuple[Any, ...]
    action: Action
    batch_size: int = 100
    columns: Mapping[str, Any] = field(default_factory=dict)
    event: tuple[NamedSignal, tuple[str, ...] | Mapping[str, str]] | None = None
    row_log: RowLog | None = None
    locks_first: bool = False
    hold: Hold | None = None
    statements: QueryCache = field(default_factory=QueryCache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Every statement uses `stale`, so none of them can forget the hold. A copy of the stage has it already.
        if self.hold is not None and not isinstance(self.stale, ExceptHeld):
            model = getattr(self.order[0], "model", None) if self.order else None
            object.__setattr__(self, "stale", ExceptHeld(self.stale, self.hold, model))

    @property
    def model(self) -> type[Model]:
        """The model of the table."""
        model: type[Model] = self.order[0].model
        return model

    @property
    def key(self) -> tuple[Field, ...]:
        """Columns that identify a row, by the model and its table."""
        return key_among(self.model, [column.column_name for column in self.order])

    def key_values(self, position: Position) -> Position:
        """Return the values of `key` in a position, which has those of `order`."""
        values = {column.column_name: value for column, value in zip(self.order, position, strict=True)}
        return tuple(values[column.column_name] for column in self.key)

    def is_position(self, position: Position) -> bool:
        """Return whether a position has as many values as the stage's `order`, so that it can be one of this stage."""
        return position == _BEFORE_NULLS or len(position) == len(self.order)

    @property
    def as_text(self) -> list[Any]:
        """Order columns that a position contains as PostgreSQL's text; integer columns need no text.

        The driver cannot return every other value unchanged, for example an infinite time or a year before 1.
        """
        return [column for column in self.order if not isinstance(column, IntegerField)]

    def position_of(self, row: Sequence[Any]) -> Position:
        """Return the position of a result row of the query `rows`."""
        texts = iter(row[len(self.order) + len(self.columns) :])
        as_text = {id(column) for column in self.as_text}
        return tuple(
            next(texts) if id(column) in as_text else value for column, value in zip(self.order, row, strict=False)
        )

    def position_after(self, batch: Batch, last: Position | None, number: int) -> tuple[Position | None, bool]:
        """Return the position after a batch of `number` rows that ends with `last`, and whether none is left."""
        position = last or batch.after
        if number >= self.batch_size:
            return position, False
        beyond = (
            batch.after is None or batch.after[0] is None or (batch.until is not None and batch.until[0] is not None)
        )
        if beyond or not self.first_may_be_null(batch):
            return position, True
        return _BEFORE_NULLS, False

    def on_real_columns(self) -> Self:
        """Return the stage without the optional columns that its table lacks, also in log lines and events.

        Its action may depend on the table's columns as well.

        Raises:
          peewee.PeeweeException: When the database cannot be asked.
        """
        remove_absent_fields(self.model)
        absent = {key for key, column in self.columns.items() if is_absent(column)}
        adapt = getattr(self.action, "on_real_columns", None)
        action: Action = self.action if adapt is None else adapt(self.model)
        if not absent:
            return self if action is self.action else replace(self, action=action)
        row_log, event = self.row_log, self.event
        if row_log is not None:
            row_log = replace(row_log, fields={name: key for name, key in row_log.fields.items() if key not in absent})
        if event is not None:
            named = {name: key for name, key in named_keys(event[1]).items() if key not in absent}
            event = (event[0], named)
        columns = {key: column for key, column in self.columns.items() if key not in absent}
        return replace(self, action=action, columns=columns, row_log=row_log, event=event)

    @property
    def locked_keys(self) -> SQL:
        """Array of the keys of the batch's rows, for the action of a stage that `locks_first`."""
        return LOCKED_KEYS

    def rows(self, batch: Batch, *, is_locked: bool = False, with_texts: bool = True) -> ModelSelect[Any]:
        """Return the query of a batch's rows: order columns, further columns, then texts for `position_of`.

        Parameters:
          is_locked: Only the rows that `lock_statement` has locked.
          with_texts: Whether the texts are selected; PostgreSQL makes those of a time slowly.
        """
        texts = [column.cast("text").alias(text_of(column)) for column in self.as_text] if with_texts else []
        query = self.model.select(*self.order, *self.columns.values(), *texts)
        if is_locked:
            return query.where(self.key[0] == fn.ANY(LOCKED_KEYS)).order_by(*self.order)
        query = query.where(self.stale(batch.now))
        if batch.only is not None:
            return query.where(self.is_one_of(batch.only)).order_by(*self.order)
        if batch.after is not None:
            query = query.where(comes_after(self.order, batch.after, partial(self._may_be_null, batch.now)))
        if batch.until is not None:
            query = query.where(comes_until(self.order, batch.until, partial(self._may_be_null, batch.now)))
        return query.order_by(*self.order).limit(self.batch_size)

    def among(self, picked: CTE) -> Expression:
        """Return the condition that a row is one of the picked rows."""
        return key_is_among(self.key, picked)

    def prepare(self, batch: Batch) -> Any:
        """Do nothing: one statement reads and changes the rows."""

    def apply(self, batch: Batch, prepared: Any = None) -> BatchResult:
        """Select, lock and change the rows in one statement. The result has them only if `needs_rows` says so."""
        if self.locks_first:
            self.run_statement(batch, "lock", partial(lock_statement, self))
        return checked_result(self, batch, self.run_statement(batch, "apply", partial(checked_statement, self)))

    def run_statement(self, batch: Batch, form: Hashable, make: Callable[[Batch], Query]) -> list[tuple[Any, ...]]:
        """Execute a statement of a batch and return its rows. It is compiled once a run; see `statement`."""
        return self.statement(batch, form, lambda batch: CompiledQuery(make(batch))).rows(*batch.after or ())

    def statement(self, batch: Batch, form: Hashable, make: Callable[[Batch], Q]) -> Q:
        """Return a batch's statement, compiled once per run. Its first parameters are the values of `batch.after`.

        Parameters:
          form: Cache key of the statement, besides the run and the batch's position.
          make: Builds and compiles the statement. The position of its batch consists of placeholders.
        """
        if batch.only is not None:
            return make(batch)
        after = batch.after
        shape = None if after is None else tuple(value is None for value in after)
        blank = None if after is None else tuple(v if v is None else Parameter(n) for n, v in enumerate(after))
        form = (form, shape, batch.until)
        return self.statements.get(self.purpose(batch), form, lambda: make(replace(batch, after=blank)))

    def purpose(self, batch: Batch) -> Hashable:
        """Return the key under which the compiled statements of this run are cached."""
        return batch.run_id, batch.now

    def needs_rows(self) -> bool:
        """Return whether the changed rows must be returned, for log lines or for a listener of the event."""
        written = self.row_log is not None and logging.getLogger(__name__).isEnabledFor(self.row_log.level)
        return written or (self.event is not None and events.has_listeners(self.event[0]))

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        if self.row_log is not None:
            fields, constants = self.row_log.fields.items(), self.row_log.constants
            each = [{**{name: row[key] for name, key in fields}, **constants} for row in result.rows]
            log_rows(__name__, self.row_log.level, self.row_log.event, each)

    def announcements(self, result: BatchResult) -> Sequence[Announcement]:
        """Return the event of the changed rows, if the stage has one and they were read back."""
        if self.event is None or not events.has_listeners(self.event[0]):
            return ()
        event, keys = self.event
        named = named_keys(keys)
        return [Announcement(event, [{name: row[key] for name, key in named.items()} for row in result.rows])]

    def positions(self, batch: Batch, prepared: Any = None) -> list[Position]:
        found = CompiledQuery(self.rows(batch).for_update(skip_locked=True)).rows()
        return [self.position_of(row) for row in found]

    def after_all(self, batch: Batch, prepared: Any, positions: Sequence[Position]) -> BatchResult:
        last = positions[-1] if positions else None
        return BatchResult({}, *self.position_after(batch, last, len(positions)))

    def fallback(self, batch: Batch, error: BaseException) -> BatchResult | None:
        return self.action.fallback(self, batch, error)

    def describe(self, position: Position) -> dict[str, Any]:
        return {column.name: readable(column, value) for column, value in zip(self.order, position, strict=True)}

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        stale = self.model.select(SQL("1")).where(self.stale(now)).limit(limit + 1)
        query: Any = stale.select_from(fn.COUNT(SQL("1")))
        rows: int = next(iter(query.tuples().execute(database)))[0]
        return Backlog(min(rows, limit), rows <= limit)

    def held(self, now: datetime, limit: int) -> Backlog | None:
        """Return the number of rows on hold among the first `limit` stale ones; None without a hold."""
        if not isinstance(self.stale, ExceptHeld):
            return None
        flagged = self.model.select(self.stale.condition().alias("is_held"))
        stale = flagged.where(self.stale.stale(now)).limit(limit + 1)
        query: Any = stale.select_from(fn.COUNT(SQL("1")), fn.COUNT(SQL("1")).filter(SQL("is_held")))
        rows, held = next(iter(query.tuples().execute(database)))
        return Backlog(held, rows <= limit)

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        return self._edge(now)

    def explain_queries(self, now: datetime) -> list[ExplainQuery]:
        query = self.rows(Batch("", None, now)).for_update(skip_locked=True)
        return [ExplainQuery(f"the query of stage {self.name}", query, self.model)]

    def statements_of_a_run(self, now: datetime) -> list[Query]:
        """Return the statements that change the rows of a batch, for `housekeeping doctor`. Executes none of them."""
        return [checked_statement(self, Batch("", None, now))]

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        stale = self.backlog(now, limit)
        samples = CompiledQuery(self.rows(Batch("", None, now)).limit(_SAMPLES)).rows()
        counted = [self.action.counted_as[0], *([] if archiving(self.action) is None else [ARCHIVED_ROWS])]
        return StagePlan(
            self.name,
            stale,
            dict.fromkeys(counted, stale.rows),
            self.oldest(now),
            self._edge(now, newest=True),
            [self.describe(self.position_of(row)) for row in samples],
            self.held(now, limit),
        )

    def is_one_of(self, positions: Sequence[Position]) -> Expression:
        """Return the condition that a row is at one of these positions."""
        return has_key(self.key, [self.key_values(position) for position in positions])

    def first_may_be_null(self, batch: Batch) -> bool:
        """Return whether the first order column can be NULL in stale rows; computed once a run."""
        return self.statements.get(
            self.purpose(batch), "first may be null", lambda: self._may_be_null(batch.now, self.order[0])
        )

    def _may_be_null(self, now: datetime, column: Field) -> bool:
        in_key = column.column_name in [each.column_name for each in self.key]
        return not in_key and may_be_null(column, self.stale(now))

    def _edge(self, now: datetime, *, newest: bool = False) -> Any:
        first: Any = self.model.select(self.order[0]).where(self.stale(now)).limit(1).tuples()
        if newest:  # rows with NULL come last, so they would be the first ones in the reverse order
            descending = (column.desc() for column in self.order)
            first = first.where(self.order[0].is_null(False)).order_by(*descending)
        else:
            first = first.order_by(*self.order)
        value = next((value for (value,) in first), None)
        # A column without a time zone is read as UTC, as the sessions do.
        return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value

    def records(self, rows: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Return the driver's rows as dictionaries, with each value converted by its column."""
        columns = (*self.order, *self.columns.values())
        # Column by column: to look up the conversion of each value takes as long as a log line.
        values = zip(columns, zip(*rows, strict=True), strict=False)
        read = zip(*([column.python_value(each) for each in found] for column, found in values), strict=True)
        return [self.record(each) for each in read]

    def record(self, row: tuple[Any, ...]) -> dict[str, Any]:
        """Return a row of the query `rows` as a dictionary, for events and log lines."""
        named = {column.name: value for column, value in zip(self.order, row, strict=False)}
        further = row[len(self.order) : len(self.order) + len(self.columns)]
        return named | dict(zip(self.columns, further, strict=True))
