"""Stale rows of one table in keyset order: the query of a batch, positions in it, and rows as dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar

from peewee import (
    SQL,
    DataError,
    Expression,
    Field,
    IntegerField,
    Model,
    ModelSelect,
    ProgrammingError,
    Query,
    Tuple,
    fn,
)

from housekeeping.core.sanitize import typed_error_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.compiled_query import CompiledQuery, Parameter, QueryCache
from housekeeping.database.connection import database
from housekeeping.database.primary_key import key_among
from housekeeping.sweeps.stages.batch_statement import LOCKED_KEYS, text_of
from housekeeping.sweeps.stages.hold import ExceptHeld, Hold
from housekeeping.sweeps.stages.keyset import (
    comes_after,
    comes_before,
    comes_until,
    has_key,
    literals,
    may_be_null,
    readable,
)
from housekeeping.sweeps.stages.stage import Batch, Position

logger = named_logger(__name__)

Q = TypeVar("Q")

#: The position before the rows whose first order column is NULL; they come last.
_BEFORE_NULLS: Final[Position] = (None,)


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """Stale rows of a table.

    Attributes:
      stale: The predicate, given the time at which the run began. Run, plan and backlog all use it.
      order: Columns that order the rows, ending with those of the primary key, so that a batch can continue after any
        row. Rows with NULL in one of them come last.
      columns: Further columns to read for events and log lines, by their key in a row. Columns in the model's
        ``optional_fields`` are left out if the table lacks them.
      newest_first: Whether the order is reversed. Only for columns without NULL, and runs that begin at the front.
      hold: Returns the condition of rows that stay although they are stale (see `held_condition`). `stale` then
        excludes them.
    """

    name: str
    stale: Any
    order: tuple[Any, ...]
    batch_size: int = 100
    columns: Mapping[str, Any] = field(default_factory=dict)
    newest_first: bool = False
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
        """Return whether a position can be one of this stage: PostgreSQL can compare it with the `order`.

        Raises:
          peewee.PeeweeException: When the database cannot be asked.
        """
        if position == _BEFORE_NULLS or len(position) != len(self.order):
            return position == _BEFORE_NULLS
        after = self.model.select(SQL("1")).where(Tuple(*self.order) > Tuple(*literals(position)))
        try:
            with database.atomic():
                CompiledQuery(after.limit(0)).rows()
        except (DataError, ProgrammingError):
            return False
        return True

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

    def rows(self, batch: Batch, *, is_locked: bool = False, with_texts: bool = True) -> ModelSelect[Any]:
        """Return the query of a batch's rows: order columns, further columns, then texts for `position_of`.

        Parameters:
          is_locked: Only the rows that `lock_statement` has locked.
          with_texts: Whether the texts are selected; PostgreSQL makes those of a time slowly.
        """
        texts = [column.cast("text").alias(text_of(column)) for column in self.as_text] if with_texts else []
        query = self.model.select(*self.order, *self.columns.values(), *texts)
        if is_locked:
            return query.where(self.key[0] == fn.ANY(LOCKED_KEYS)).order_by(*self.directed(self.order))
        query = query.where(self.stale(batch.now))
        if batch.only is not None:
            return query.where(self.is_one_of(batch.only)).order_by(*self.directed(self.order))
        if batch.after is not None and self.newest_first:
            query = query.where(comes_before(self.order, batch.after))
        elif batch.after is not None:
            query = query.where(comes_after(self.order, batch.after, partial(self._may_be_null, batch.now)))
        if batch.until is not None:
            query = query.where(comes_until(self.order, batch.until, partial(self._may_be_null, batch.now)))
        return query.order_by(*self.directed(self.order)).limit(self.batch_size)

    def directed(self, columns: Sequence[Any], *, reverse: bool = False) -> list[Any]:
        """Return the columns of the order as an ORDER BY takes them, or in reverse."""
        return [column.desc() for column in columns] if self.newest_first is not reverse else list(columns)

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

    def describe(self, position: Position) -> dict[str, Any]:
        return {column.name: readable(column, value) for column, value in zip(self.order, position, strict=True)}

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

    def records(self, rows: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Return the driver's rows as dictionaries, each value converted by its column, or unchanged if that raises."""
        columns = (*self.order, *self.columns.values())
        # Column by column: to look up the conversion of each value takes as long as a log line.
        values = zip(columns, zip(*rows, strict=True), strict=False)
        read = zip(*(_read(column, found) for column, found in values), strict=True)
        return [self.record(each) for each in read]

    def record(self, row: tuple[Any, ...]) -> dict[str, Any]:
        """Return a row of the query `rows` as a dictionary, for events and log lines."""
        named = {column.name: value for column, value in zip(self.order, row, strict=False)}
        further = row[len(self.order) : len(self.order) + len(self.columns)]
        return named | dict(zip(self.columns, further, strict=True))


def _read(column: Any, values: Sequence[Any]) -> Sequence[Any]:
    try:
        return [column.python_value(each) for each in values]
    except Exception as error:
        logger.warning("Values cannot be read", column=column.column_name, error=typed_error_line(error))
        return [_read_one(column, each) for each in values]


def _read_one(column: Any, value: Any) -> Any:
    try:
        return column.python_value(value)
    except Exception:  # the caller has logged the first one
        return value
