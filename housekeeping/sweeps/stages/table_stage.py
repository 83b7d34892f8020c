"""Stage of a sweep that processes one table: in keyset order, oldest first, one statement a batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Self

from blinker import NamedSignal
from peewee import CTE, SQL, Expression, Query, fn

from housekeeping.core import events
from housekeeping.core.telemetry.logs import log_rows
from housekeeping.database.catalog import is_absent, remove_absent_fields
from housekeeping.database.compiled_query import CompiledQuery
from housekeeping.database.connection import database
from housekeeping.sweeps.stages.actions import Action, archiving
from housekeeping.sweeps.stages.archive import ARCHIVED_ROWS
from housekeeping.sweeps.stages.batch_statement import (
    LOCKED_KEYS,
    checked_result,
    checked_statement,
    key_is_among,
    lock_statement,
)
from housekeeping.sweeps.stages.hold import ExceptHeld
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
from housekeeping.sweeps.stages.table_rows import TableRows

_SAMPLES: Final = 5


def named_keys(keys: tuple[str, ...] | Mapping[str, str]) -> Mapping[str, str]:
    """Return the keys of an event's row, each with the key of the record that it is copied from."""
    return keys if isinstance(keys, Mapping) else dict(zip(keys, keys, strict=True))


@dataclass(frozen=True, kw_only=True)
class TableStage(TableRows):
    """Stage that processes the rows of one table. Rows that another transaction has locked are skipped.

    Attributes:
      action: What is done with the stale rows of a batch.
      event: The event announced with the changed rows of each batch, and the keys of the row that it carries; a mapping
        if the event has other names for them (event's key -> row's key).
      row_log: The log line of each changed row.
      locks_first: Whether the rows are locked by a statement of their own, so that the one that changes them sees
        everything that was committed before the locks. Only for a table whose key is one integer.
    """

    action: Action
    event: tuple[NamedSignal, tuple[str, ...] | Mapping[str, str]] | None = None
    row_log: RowLog | None = None
    locks_first: bool = False

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
