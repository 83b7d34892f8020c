"""Batch that is one statement: it changes the rows and writes the run's row, and commits by itself.

It succeeds only if everything is as expected: the run is still the current one, its lease has no newer holder, and each
picked row was changed. Otherwise it fails and changes nothing. The batch is then processed in a transaction, which
finds out what is wrong.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Final

from peewee import CTE, JOIN, OP, SQL, Case, Expression, Query, Select, Value, fn

from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.context import span
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.catalog import table_if_visible
from housekeeping.database.compiled_query import Parameter
from housekeeping.database.prepared_query import PreparedQuery
from housekeeping.sweeps.engine.traversal import DONE, RunState
from housekeeping.sweeps.ledger import batch_row
from housekeeping.sweeps.ledger.overrides import Override, override_from
from housekeeping.sweeps.ledger.run_start import Attempt
from housekeeping.sweeps.ledger.runs import Counts, Cursor
from housekeeping.sweeps.stages.actions import Write
from housekeeping.sweeps.stages.batch_statement import (
    changes,
    columns_of,
    count_of,
    counted,
    is_changed,
    lock_statement,
    order_of,
)
from housekeeping.sweeps.stages.stage import Batch, BatchResult
from housekeeping.sweeps.stages.table_stage import TableStage

logger = named_logger(__name__)

#: Text that the statement casts to a boolean in order to fail.
REFUSED: Final = "housekeeping: batch refused"


@dataclass(frozen=True, slots=True)
class Committed:
    """A batch that was committed with its ledger row.

    Attributes:
      override: The worker's override now.
      is_closed: Whether the run's row was closed as done.
    """

    result: BatchResult
    override: Override | None
    is_closed: bool


class OneRoundTrip:
    """Committer of the batches of one run, each in one round trip.

    Attributes:
      heartbeat_at: The row's last heartbeat; None after another statement has written one.
    """

    def __init__(self, worker: str, attempt: Attempt) -> None:
        self._worker = worker
        self._run_id = attempt.run_id
        self._fence = attempt.fence
        self.heartbeat_at = attempt.heartbeat_at

    def commit(
        self, stage: TableStage, batch: Batch, *, counts: Counts, cursor: Cursor | None, ends_run: bool
    ) -> Committed:
        """Commit a batch together with its counts and cursor, in one statement.

        Parameters:
          counts, cursor: Those of the run before the batch.
          ends_run: Whether the run ends as done if the batch is not full.

        Raises:
          peewee.DataError: The run or its lease was taken over, or a picked row was not changed. Nothing was changed;
          the text has `REFUSED`.
          peewee.PeeweeException: The database failed. Nothing was changed, unless the connection was lost.
        """
        with_rows = stage.needs_rows()
        form = ("at once", with_rows, "batches" in counts)
        statement = stage.statement(batch, form, partial(self._compiled, stage, with_rows, counts))
        own = (json.dumps(counts), None if cursor is None else json.dumps(cursor), self.heartbeat_at, ends_run)
        with span("housekeeping.batch"):
            rows = statement.rows_at_once(*(batch.after or ()), *own)
        width = 1 + len(stage.order) + len(stage.columns) if with_rows else 0
        position, picked, override, self.heartbeat_at, _, *numbers = rows[0][width:]
        return Committed(
            BatchResult(
                counted(stage, numbers),
                *stage.position_after(batch, None if position is None else tuple(json.loads(position)), picked),
                rows=stage.records([row[1:] for row in rows if row[0]]) if with_rows else (),
            ),
            override_from(self._worker, override),
            is_closed=ends_run and picked < stage.batch_size,
        )

    def after_lost_answer(self, before: RunState, error: Exception) -> tuple[BatchResult, RunState] | None:
        """Return what the ledger has of a batch whose answer was lost: its result and state; None if it did not commit.

        Raises:
          Exception: The given error, if the row's heartbeat before the batch is unknown. The ledger cannot tell then.
          RunTakenOver, peewee.PeeweeException: As `resynchronize`.
        """
        if self.heartbeat_at is None:
            raise error
        found = batch_row.resynchronize(self._run_id, self.heartbeat_at)
        self.heartbeat_at = None
        logger.warning("The connection was lost, the run continues", error=error_line(error))
        if found is None:
            return None
        after = tuple(found.cursor["after"]) if found.cursor and found.cursor["after"] else None
        state = replace(before, counts=found.counts, place=replace(before.place, after=after))
        result = BatchResult(position=after, exhausted=found.is_closed)
        return result, replace(state, verdict=DONE if found.is_closed else None)

    def _compiled(self, stage: TableStage, with_rows: bool, before: Counts, batch: Batch) -> PreparedQuery:
        query = self._query(stage, with_rows, before, batch)
        return PreparedQuery(lock_statement(stage, batch), query) if stage.locks_first else PreparedQuery(query)

    def _query(self, stage: TableStage, with_rows: bool, before: Counts, batch: Batch) -> Query:
        width = len(batch.after or ())
        counts, cursor, heartbeat, ends_run = (
            Parameter(width + number).cast(kind)
            for number, kind in enumerate(("jsonb", "jsonb", "timestamptz", "boolean"))
        )
        table = table_if_visible(stage.model)
        # By a declared key that is not unique, more rows change than were picked, which undoes the batch. Not by ctid.
        by_ctid = table.plain and table.is_unique(column.column_name for column in stage.key)
        picked, write = changes(stage, batch, by_ctid=by_ctid, with_texts=False)
        names = [f"n{number}" for number in range(len(write.ctes))]
        totals = [count_of(each).alias(name) for name, each in zip(names, write.ctes, strict=True)]
        last = _last_position(stage, picked).alias("position")
        numbers = Select(columns=[last, count_of(picked).alias("picked"), *totals]).cte("numbers", materialized=True)
        done = [getattr(numbers.c, name) for name in names]
        added = dict(zip(write.counts, done, strict=True))
        if "batches" in before:
            added["batches"] = Case(None, [(reduce(operator.add, done) > 0, 1)], 0)
        place = fn.JSONB_BUILD_OBJECT("pass", stage.name, "after", numbers.c.position)
        advanced, accepted = batch_row.advance_cte(
            self._run_id,
            self._fence,
            numbers,
            counts=counts.concat(_sums(counts, added)),
            cursor=Case(None, [(numbers.c.picked > 0, place)], cursor),
            is_done=ends_run & (numbers.c.picked < stage.batch_size),
            heartbeat=heartbeat,
        )
        is_complete = write.holds or numbers.c.picked == done[0]
        if write.requires is not None:
            is_complete = Expression(is_complete, OP.AND, write.requires)
        is_expected = fn.EXISTS(Select((accepted,), [SQL("1")])) & is_complete
        scalars = [
            # As text: the driver would read the JSON of each row.
            numbers.c.position.cast("text"),
            numbers.c.picked,
            advanced.c.override,
            advanced.c.heartbeat_at,
            Case(None, [(is_expected, "true")], REFUSED).cast("boolean"),
            *done,
        ]
        ctes = (picked, *write.before, *write.ctes, numbers, advanced, accepted)
        # Outer joins: the ledger's part is one row even if no row was picked or the run was taken over.
        columns = _row_columns(stage, picked, write) if with_rows else []
        query = Select((numbers,), [*columns, *scalars]).join(advanced, JOIN.LEFT_OUTER, on=SQL("true"))
        if with_rows:
            query = query.join(picked, JOIN.LEFT_OUTER, on=SQL("true")).order_by(
                *stage.directed(order_of(stage, picked))
            )
        return query.with_cte(*ctes)


def _last_position(stage: TableStage, picked: CTE) -> Select:
    """Return the position of the last picked row, as JSON."""
    order = order_of(stage, picked)
    # A subquery: PostgreSQL would build the JSON of every row, and then sort.
    last = Select((picked,), order).order_by(*stage.directed(order, reverse=True)).limit(1).alias("last")
    as_text = {id(column) for column in stage.as_text}
    values = [
        place.cast("text") if id(column) in as_text else place
        for column, place in zip(stage.order, order_of(stage, last), strict=True)
    ]
    return Select((last,), [fn.JSONB_BUILD_ARRAY(*values)])


def _sums(counts: Any, added: Mapping[str, Any]) -> Any:
    """Return the counts that grow, with their new values, as JSON."""
    sums = {key: fn.JSONB_EXTRACT_PATH_TEXT(counts, key).cast("bigint") + value for key, value in added.items()}
    return fn.JSONB_BUILD_OBJECT(*(part for key, each in sums.items() for part in (Value(key), each)))


def _row_columns(stage: TableStage, picked: CTE, write: Write) -> list[Any]:
    """Return whether a picked row was changed, and its columns."""
    changed = order_of(stage, picked)[-1].is_null(False) if write.holds is None else is_changed(stage, picked, write)
    return [changed, *columns_of(stage, picked)]
