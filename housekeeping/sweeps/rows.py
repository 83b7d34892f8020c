"""Declaration of the stage of one table, and the stage that calls a function for each row."""

from __future__ import annotations

import dataclasses
import inspect
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, Final, Self

from peewee import SQL, EnclosedNodeList, Expression, Model
from pydantic import Field, SkipValidation

from housekeeping.core.errors import DeclarationError
from housekeeping.core.events import Event
from housekeeping.core.logs import described
from housekeeping.core.settings import LARGEST_BATCH
from housekeeping.database.errors import caused_by
from housekeeping.database.queries import CompiledQuery
from housekeeping.sweeps.actions import Delete, Transition, allowed_by, delete_of
from housekeeping.sweeps.conditions import Row, bare
from housekeeping.sweeps.keyset import text_of
from housekeeping.sweeps.stage import Batch, BatchResult, Failure, Position, RowLog
from housekeeping.sweeps.table_stage import TableStage, Write, counted, counts_of, progress_of
from housekeeping.sweeps.tables import column_named, keyset_order, model_of
from housekeeping.sweeps.values import declared


@declared
class Call:
    """Call a function for each stale row, outside of any transaction, and change the row once that has succeeded.

    ::

        action=Call(cancel_at_the_carrier, then=Transition(machine, "expire"))

    The function must be repeatable. If the process is killed between a call and the commit of its batch, the row stays
    unchanged and the next run calls the function for it again. The same happens if another session has locked or
    changed the row by then, or if a trigger or a constraint rejects the change. A lease keeps two runs from calling the
    function for the same row at the same time.

    Note: Give the function a time limit of well under a minute. A run that sends no heartbeat for a minute is
    considered dead. The run checks its time limit, a pause and a shutdown between two calls.

    Attributes:
      function: Called with one row, as an object of the sweep's model with all columns. If it raises, the row stays
        unchanged; it is logged, reported and counted as ``failed``, and the next run tries it again.
      then: The change of the rows for which the function succeeded, if they are still stale. Only a `Subject` has a
        call without one.
      whole_batch: Whether to call the function with the list of all rows of a batch. If it raises, it is called again
        with a list of each row alone, to find the row that fails.
      unavailable_errors: Exception types that mean that the called service is unavailable. Such an error, or one
        caused by it, ends the run as failed once the rows that succeeded are written. No row counts as failed for it.
        Default: a refused, reset or broken connection, and a name that does not resolve. A timeout fails only its row
        unless it is listed here.
    """

    function: Callable[[Any], object]
    then: Delete | Transition | None = None
    whole_batch: bool = False
    unavailable_errors: tuple[type[Exception], ...] = (ConnectionError, socket.gaierror)

    @property
    def counted_as(self) -> Sequence[str]:
        return () if self.then is None else self.then.counted_as

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        assert self.then is not None, "Rows refuses it"
        return self.then.write(table, batch, chosen)

    def on_real_columns(self, model: type[Model]) -> Self:
        """Return the action for all columns that the table has now."""
        if not isinstance(self.then, Delete):
            return self
        return dataclasses.replace(self, then=self.then.on_real_columns(model))

    def is_unavailable(self, error: BaseException) -> bool:
        """Return whether the error, or one that caused it, means that the service is unavailable."""
        return caused_by(error, self.unavailable_errors)


@dataclass(slots=True)
class _Taken:
    """Rows of a batch after the calls.

    Attributes:
      called: Rows for which the function succeeded.
      failures: Rows for which it failed.
      position: Position of the last row called for; None for the front.
      end, exhausted: Where the whole batch ends, and whether nothing is left after it.
      complete: Whether the function was called for the whole batch.
    """

    position: Position | None
    end: Position | None
    exhausted: bool
    complete: bool = True
    called: list[Position] = field(default_factory=list)
    failures: list[tuple[Position, Failure]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CallStage(TableStage):
    """Table stage whose action is a `Call`."""

    action: Call
    is_timed: ClassVar[bool] = False

    def prepare(self, batch: Batch) -> _Taken:
        """Call the function for each row of the batch that no other transaction has locked.

        Raises:
          Exception: The called service is unavailable, and no row has to be written first.
        """
        texts = [column.cast("text").alias(text_of(column)) for column in self.as_text]
        query: Any = self.locking(batch, self.rows(batch).select(self.model, *texts))
        rows = CompiledQuery(query).rows()
        last = self._position(rows[-1]) if rows else None
        prepared = _Taken(batch.after, *self.position_after(batch, last, len(rows)))
        waiting = [rows] if self.action.whole_batch and rows else [[row] for row in rows]
        while waiting:
            some = waiting.pop(0)
            positions = [self._position(row) for row in some]
            try:
                records = [self._record(row) for row in some]
                self.action.function(records if self.action.whole_batch else records[0])
            except Exception as error:
                if self.action.is_unavailable(error):
                    if not (prepared.called or prepared.failures):
                        raise
                    # The rows that succeeded are written first. The next batch meets the same error.
                    prepared.complete = False
                    break
                if len(some) > 1:
                    waiting = [[row] for row in some]
                    continue
                prepared.failures.append((positions[0], Failure(self.describe(positions[0]), error)))
            else:
                prepared.called += positions
            prepared.position = positions[-1]
            if waiting and batch.time_is_up():
                prepared.complete = False
                break
        return prepared

    def apply(self, batch: Batch, prepared: _Taken) -> BatchResult:  # type: ignore[override]
        """Change the rows for which the call succeeded and that are still stale."""
        called = [position for position in prepared.called if self._is_about(batch, position)]
        failures = [failure for position, failure in prepared.failures if self._is_about(batch, position)]
        changed = super().apply(dataclasses.replace(batch, only=called)) if called else BatchResult(counted(self, ()))
        end = self.after_all(batch, prepared, ())
        return dataclasses.replace(
            changed, position=end.position, exhausted=end.exhausted, failures=[*failures, *changed.failures]
        )

    def positions(self, batch: Batch, prepared: _Taken | None = None) -> list[Position]:
        if prepared is None:
            return super().positions(batch)
        return [*prepared.called, *(position for position, _ in prepared.failures)]

    def after_all(self, batch: Batch, prepared: _Taken, positions: Sequence[Position]) -> BatchResult:
        if not prepared.complete:
            return BatchResult({}, prepared.position, exhausted=False)
        return BatchResult({}, prepared.end, prepared.exhausted)

    def _record(self, row: Sequence[Any]) -> Any:
        """Return the driver's row as an object of the model. A field that cannot read its value raises."""
        kind: Any = self.model
        fields = zip(kind._meta.sorted_fields, row, strict=False)
        record = kind(__no_default__=True, **{field.name: field.python_value(value) for field, value in fields})
        record._dirty.clear()
        return record

    def _position(self, row: Sequence[Any]) -> Position:
        fields = self.model._meta.sorted_fields
        values = {field.name: value for field, value in zip(fields, row, strict=False)}
        texts = dict(zip(map(id, self.as_text), row[len(fields) :], strict=True))
        return tuple(texts.get(id(column), values[column.name]) for column in self.order)

    def _is_about(self, batch: Batch, position: Position) -> bool:
        # A batch that failed at its commit is applied again in parts.
        return batch.only is None or self.key_values(position) in [self.key_values(each) for each in batch.only]


#: Greatest age. With a greater one a limit may be no date in PostgreSQL.
_OLDEST: Final = timedelta(days=100 * 366)
EXAMPLE: Final = "lambda row, now: row.expires_at <= now"
HOLD_EXAMPLE: Final = "lambda row: row.on_hold"


class OfTable:
    """Base class of a declared stage that names its table."""

    table: Any

    @property
    def is_named(self) -> bool:
        """Whether the table is given by its name, so that only the database knows its columns."""
        return isinstance(self.table, str)

    @property
    def model(self) -> type[Model]:
        """The table's model.

        Raises:
          DeclarationError: There is no such table.
          peewee.PeeweeException: The catalog cannot be read, for a table that is given by its name.
        """
        return model_of(self.table)


@declared
class Rows(OfTable):
    """Stage that processes the stale rows of one table, oldest first.

    ::

        Rows(Session, stale=lambda row, now: row.expires_at <= now, order="expires_at", action=Delete())

    Attributes:
      table: A model derived from `BaseModel`, a Django model, a SQLAlchemy `Table` or mapped class, or a table's name,
        such as ``"public.session"``. The columns of a name are read from the catalog when they are first needed.
      stale: Returns the condition of the stale rows, given the table's columns as attributes and the time at which the
        run began, minus `age`. A function of the columns alone says that the time makes no difference.
      action: What is done with the stale rows: `Delete`, `Transition`, `Call`, or an action of your own.
      order: Names of the columns that order the rows, oldest first. The primary key is appended.
      age: Age from which a row is stale: `stale` gets a time that much earlier. The setting ``stale_after_s``.
      hold: Returns the condition of rows that must stay although they are stale, or a query that finds something for
        each of them, given the same as `stale`. Runs, plans and backlogs leave them out. It is SQL, so the next batch
        sees a new hold.
      event: Event announced with the changed rows of each batch.
      log: Log line of each changed row. The option ``log_records``, if the sweep has it, switches it off.
      batch: Rows per transaction of this stage, which may grow and shrink as those of `Limits`. Default: those of the
        sweep's `Limits`.
      name: Name of the stage in plans and cursors. Default: ``rows``, or the table's name if there are several stages.
    """

    table: Any
    _: KW_ONLY
    stale: Callable[[Row, datetime], Any] | Callable[[Row], Any]
    action: Any
    order: Annotated[str | Sequence[str], SkipValidation] = ()
    age: Annotated[timedelta, Field(gt=timedelta(), le=_OLDEST)] | None = None
    hold: Callable[[Row, datetime], Any] | Callable[[Row], Any] | None = None
    event: Event | None = None
    log: RowLog | None = None
    batch: Annotated[int, Field(ge=1, le=LARGEST_BATCH)] | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.action, type):
            raise DeclarationError(f"Rows: action should be {self.action.__name__}(), with brackets")
        if not all(hasattr(self.action, each) for each in ("write", "counted_as")):
            raise DeclarationError(
                f"Rows: action is {described(self.action)}; write Delete(), Transition(machine, event) or "
                "Call(function, then=Delete())"
            )
        if isinstance(self.action, Call) and self.action.then is None:
            raise DeclarationError("Rows: action is a Call without `then`; write Call(function, then=Delete())")
        _check_signature("stale", self.stale, EXAMPLE)
        if self.hold is not None:
            _check_signature("hold", self.hold, HOLD_EXAMPLE)

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of the counts of a run, in display order."""
        return counts_of(self.action)

    @property
    def progress_counts(self) -> tuple[str, ...]:
        """Names of the counts that are processed rows."""
        return progress_of(self.action)

    def stage(self, owner: str, batch: int, *, alone: bool, logs: bool) -> TableStage:
        """Return the stage of a run.

        Parameters:
          owner: The sweep, for errors.
          batch: Rows per transaction, if the declaration has none.
          alone: Whether it is the sweep's only stage.
          logs: Whether changed rows are logged.
        """
        model = self.model
        order = keyset_order(owner, model, self.order)
        ordered = [column.name for column in order]
        event, log = self.event, self.log if logs else None
        further = [*(event.columns.values() if event else ()), *(log.fields.values() if log else ())]
        fields = {each: column_named(owner, model, each) for each in further}
        options: dict[str, Any] = {
            "name": self.name or ("rows" if alone else str(model._meta.table_name)),
            "stale": Predicate(self.stale, model, self.age, self.action),
            "order": order,
            "action": self.action,
            "batch_size": self.batch or batch,
            "columns": {column.name: column for column in fields.values() if column.name not in ordered},
            "event": event and Event(event.signal, **_keys(event.columns or dict.fromkeys(ordered), fields)),
            "row_log": log and replace(log, fields=_keys(log.fields, fields)),
            "hold": None if self.hold is None else Predicate(self.hold, model, self.age),
        }
        calls = CallStage(**options) if isinstance(self.action, Call) else None
        delete = delete_of(self)
        if delete is not None and delete.dependents is not None:
            from housekeeping.sweeps.cascade import CascadeStage  # commands that only list workers do without it

            return CascadeStage(**options, calls=calls, delete=delete)
        return calls or TableStage(**options)


@dataclass(frozen=True, slots=True)
class Predicate:
    """Declared predicate or hold as a function of the time alone, limited to the rows that the action can change.

    Any other row would stay stale for ever: every run would meet it, and every plan count it. A hold has no action.
    """

    stale: Callable[..., Any]
    model: type[Model]
    age: timedelta | None = None
    action: Any = None

    def __call__(self, now: datetime) -> Any:
        row, at = Row(self.model), now - (self.age or timedelta())
        stale: Any = bare(self.stale(row, at) if takes_time(self.stale) else self.stale(row))
        if isinstance(stale, SQL):  # may have an OR, which binds less than what it is joined with
            stale = EnclosedNodeList([stale])
        allowed = allowed_by(self.action)
        return stale if allowed is None else stale & allowed


def takes_time(stale: Callable[..., Any]) -> bool:
    """Return whether a predicate or a hold depends on the time: whether it is called with a row and the time."""
    return _accepts(stale, 2)


def _check_signature(field: str, function: Callable[..., Any], example: str) -> None:
    """Reject a function that can be called neither with a row and the time nor with a row."""
    if not any(_accepts(function, number) for number in (2, 1)):
        raise DeclarationError(f"Rows: {field} is called with a row and the time; write {example}")


def _accepts(function: Callable[..., Any], number: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * number)
    except TypeError:
        return False
    except ValueError:  # some functions written in C have no signature
        return True
    return True


def _keys(names: Mapping[str, str | None], fields: Mapping[str, Any]) -> dict[str, str]:
    """Return each name with the key of its column in the row."""
    return {name: name if column is None else fields[column].name for name, column in names.items()}
