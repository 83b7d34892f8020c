"""Stage that has an effect outside the database for each stale row, then changes the row."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from peewee import Expression, Model

from housekeeping.database.compiled_query import CompiledQuery
from housekeeping.database.errors import caused_by
from housekeeping.sweeps.checks.field_types import check_types
from housekeeping.sweeps.stages.actions import Delete, Transition, Write
from housekeeping.sweeps.stages.batch_statement import counted, text_of
from housekeeping.sweeps.stages.stage import Batch, BatchResult, Failure, Position
from housekeeping.sweeps.stages.table_stage import TableStage


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function for each stale row, outside of any transaction, and change the row once that has succeeded.

    ::

        action=Call(cancel_at_the_carrier, then=Transition(machine, "expire"))

    The function must be repeatable. If the process is killed between a call and the commit of its batch, the row stays
    unchanged and the next run calls the function for it again. The same happens if another session has locked or
    changed the row by then. A lease keeps two runs from calling the function for the same row at the same time.

    Note: Give the function a time limit of well under a minute. A run that sends no heartbeat for a minute is
    considered dead. The run checks its time limit, a pause and a shutdown between two calls.

    Attributes:
      function: Called with one row, as an object of the sweep's model with all columns. If it raises, the row stays
        unchanged; it is logged, reported and counted as ``failed``, and the next run tries it again.
      then: The change of the rows for which the function succeeded, if they are still stale.
      whole_batch: Whether to call the function with the list of all rows of a batch. If it raises, it is called again
        with a list of each row alone, to find the row that fails.
      unavailable_errors: Exception types that mean that the called service is unavailable. Such an error, or one
        caused by it, ends the run as failed once the rows that succeeded are written. No row counts as failed for it.
        Default: a refused, reset or broken connection, and a name that does not resolve. A timeout fails only its row
        unless it is listed here.
    """

    function: Callable[[Any], object]
    then: Delete | Transition
    whole_batch: bool = False
    unavailable_errors: tuple[type[Exception], ...] = (ConnectionError, socket.gaierror)

    def __post_init__(self) -> None:
        check_types("Call", self)

    @property
    def counted_as(self) -> Sequence[str]:
        return self.then.counted_as

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        return self.then.write(table, batch, chosen)

    def fallback(self, table: TableStage, batch: Batch, error: BaseException) -> BatchResult | None:
        return None

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

    def prepare(self, batch: Batch) -> _Taken:
        """Call the function for each row of the batch that no other transaction has locked.

        Raises:
          Exception: The called service is unavailable, and no row has to be written first.
        """
        texts = [column.cast("text").alias(text_of(column)) for column in self.as_text]
        query: Any = self.rows(batch).select(self.model, *texts).for_update(skip_locked=True)
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
