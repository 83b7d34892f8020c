"""Commit of a batch: its rows, the run's counts, its cursor and the check of its lease become final together.

Most batches are one statement that commits by itself (`Commit.in_one_statement`). It succeeds only if everything is as
expected: the run is still the current one, its lease has no newer holder, and each picked row has the values that were
written to it. Otherwise it fails and changes nothing. The batch is then processed in a transaction
(`Commit.in_transaction`), which finds out what is wrong, and in which handlers of the batch's event can take part.
"""

from __future__ import annotations

import json
import operator
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, Final, TypeVar

from peewee import (  # type: ignore[attr-defined]  # the wrapper is not in the stubs
    CTE,
    JOIN,
    OP,
    SQL,
    Case,
    Expression,
    PeeweeException,
    Query,
    Select,
    Value,
    __exception_wrapper__,
    fn,
)
from psycopg2.extensions import TRANSACTION_STATUS_INERROR, TRANSACTION_STATUS_UNKNOWN

from housekeeping.core import events
from housekeeping.core.errors import HandlerFailed, HousekeepingError, TransactionEnded, Unconfirmed
from housekeeping.core.logs import error_line, shortened, typed_error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.telemetry import batch_span, report
from housekeeping.database.catalog import table_if_visible
from housekeeping.database.connection import database
from housekeeping.database.errors import Kind, cause_of, caused_by, is_conflict, kind_of, sqlstate
from housekeeping.database.queries import Inputs, Parameter, PreparedQuery, StatementTexts, with_parameters
from housekeeping.engine.failures import due_for_report
from housekeeping.ledger import outbox, runs
from housekeeping.ledger.operators import Override, override_from
from housekeeping.ledger.runs import Counts, Cursor, Outcome, RunRow, RunStart
from housekeeping.ledger.schema import OutboxRow, Run
from housekeeping.sweeps.stage import Announcement, Announcing, Batch, BatchResult, ExpectedChange, Stage
from housekeeping.sweeps.table_stage import (
    TableStage,
    Write,
    changes,
    columns_of,
    count_of,
    counted,
    is_as_written,
    is_changed,
    lock_statement,
    order_of,
)

logger = named_logger(__name__)

T = TypeVar("T")

#: Text that the statement casts to a boolean in order to fail.
REFUSED: Final = "housekeeping: batch refused"
_TRIES: Final = 4
#: An expected change waits so long for a lock, far less than PostgreSQL's `deadlock_timeout`, so that it is never the
#: application that is ended. The batch is then processed in a transaction, which skips locked rows.
_WAIT_MS: Final = 10
LONGEST_ERROR: Final = 300  # characters of an error in a log line
#: Errors of a handler that cannot reach its service. They end the run, because no row is at fault.
UNREACHABLE: Final = (ConnectionError, socket.gaierror)
_SAVEPOINT: Final = "housekeeping_handler"
#: SQLSTATEs of a savepoint that is gone: no transaction is open, or a new one.
_ENDED: Final = ("25P01", "3B001")


class Commit:
    """Commits the batches of one run, and delivers their events."""

    def __init__(self, worker: str, begun: RunStart, texts: StatementTexts) -> None:
        self._worker = worker
        self._texts = texts
        self._run_id = begun.run_id
        self._fence = begun.fence
        self._announcements: Sequence[Announcement] = ()
        self._stored: list[OutboxRow] = []
        self._failing: set[tuple[str, str]] = set()
        #: The row's last heartbeat; None after another statement has written one.
        self._heartbeat_at = begun.heartbeat_at
        self._messages: dict[str, PreparedQuery] = {}

    def fits_one_statement(self, stage: TableStage, counts: Counts) -> bool:
        """Return whether one statement can process a batch of the stage, given the counts of the run."""
        return (
            type(stage).apply is TableStage.apply
            # Citus refuses the volatile functions of the ledger's part in one statement with shards.
            and table_if_visible(stage.model).distribution in (None, "local")
            and not stage.calls_handlers()
            and set(stage.action.counted_as) <= set(counts)
        )

    def in_one_statement(
        self,
        stage: TableStage,
        batch: Batch,
        *,
        counts: Counts,
        cursor: Cursor | None,
        ends_run: bool,
        all_stages: Sequence[TableStage],
        look: Callable[[], None] | None = None,
    ) -> tuple[BatchResult, Override | None, bool, bool]:
        """Commit a batch together with its counts and cursor, in one round trip.

        Returns its result, the run's override now, whether the run's row was closed as done, and whether it was closed
        with a backlog of 0. Otherwise the backlog is still to be counted.

        Parameters:
          counts, cursor: Those of the run before the batch.
          ends_run: Whether the run ends as done if the batch is not full.
          all_stages: All stages, this one last, if the batch is to find out whether no stale rows are left. The batch
            begins at the front of its stage. Otherwise empty.
          look: Called before the commit, while the batch holds its locks. The commit is then a separate statement.

        Raises:
          peewee.DataError: The run or its lease was taken over, or a picked row was not changed. Nothing was changed;
          the text has `REFUSED`.
          peewee.PeeweeException: The database failed. Nothing was changed, unless the connection was lost.
        """
        with_rows = stage.needs_rows()
        form = ("at once", with_rows, "batches" in counts, bool(all_stages))
        statement = stage.statement(batch, form, partial(self._compiled, stage, with_rows, counts, all_stages))
        own = (json.dumps(counts), None if cursor is None else json.dumps(cursor), self._heartbeat_at, ends_run)
        of_run = (self._run_id, *(self._fence or ()))
        rows = self._rows(statement, (*(batch.after or ()), *own, *of_run), look)
        width = 1 + len(stage.order) + len(stage.columns) if with_rows else 0
        position, picked, override, stopped_by, self._heartbeat_at, left, _, *numbers = rows[0][width:]
        result = BatchResult(
            counted(stage, numbers),
            *stage.position_after(batch, None if position is None else tuple(json.loads(position)), picked),
            rows=stage.records([row[1:] for row in rows if row[0]]) if with_rows else (),
        )
        if result.rows:
            self._collect(stage, result)
        is_closed = ends_run and picked < stage.batch_size
        return result, override_from(self._worker, override, stopped_by), is_closed, left == 0

    def as_expected(
        self,
        change: ExpectedChange,
        *,
        counts: Counts,
        cursor: Cursor | None,
        look: Callable[[], None] | None = None,
    ) -> tuple[BatchResult, Override | None]:
        """Commit an expected change together with counts and cursor, in one round trip.

        Returns its result, and the run's override now.

        Parameters:
          counts, cursor: Those of the run after the batch.
          look: As for `in_one_statement`.

        Raises:
          peewee.PeeweeException: As `in_one_statement`; the change was another one than expected.
        """
        if change.text not in self._messages:
            self._messages[change.text] = self._message(change)
        own = (json.dumps(counts), None if cursor is None else json.dumps(cursor), self._heartbeat_at)
        rows = self._rows(self._messages[change.text], (*change.values, *own), look)
        ((override, stopped_by, self._heartbeat_at, done, _),) = rows
        change.done(*json.loads(done)[1:])
        return change.result, override_from(self._worker, override, stopped_by)

    @staticmethod
    def _rows(query: PreparedQuery, values: Sequence[Any], look: Callable[[], None] | None) -> list[tuple[Any, ...]]:
        with batch_span():
            if look is None:
                return query.rows_at_once(*values)
            with database.atomic():
                rows = query.rows_at_once(*values)
                look()
            return rows

    def _message(self, change: ExpectedChange) -> PreparedQuery:
        width = len(change.values)
        counts, cursor, heartbeat = (
            Parameter(width + number).cast(kind) for number, kind in enumerate(("jsonb", "jsonb", "timestamptz"))
        )
        batch = fn.CURRENT_SETTING("housekeeping.batch")
        numbers = Select(columns=[batch.alias("done")]).cte("numbers", materialized=True)
        advanced, accepted = runs.advance_cte(
            self._run_id,
            self._fence,
            numbers,
            counts=counts,
            cursor=cursor,
            is_done=SQL("false"),
            heartbeat=heartbeat,
        )
        is_expected = fn.EXISTS(Select((accepted,), [SQL("1")])) & SQL("(numbers.done::json ->> 0)::boolean")
        columns = [
            advanced.c.override,
            advanced.c.stopped_by,
            advanced.c.heartbeat_at,
            numbers.c.done,
            Case(None, [(is_expected, "true")], REFUSED).cast("boolean"),
        ]
        query = Select((numbers,), columns).join(advanced, JOIN.LEFT_OUTER, on=SQL("true"))
        wait = Select(columns=[fn.SET_CONFIG("lock_timeout", f"{_WAIT_MS}ms", True)])
        return PreparedQuery(wait, with_parameters(change.text, width), query.with_cte(numbers, advanced, accepted))

    def after_lost_answer(self, error: Exception) -> RunRow | None:
        """Return what the ledger has after a batch whose answer was lost; None if the batch did not commit.

        Raises:
          Exception: The given error, if the row's heartbeat before the batch is unknown. The ledger cannot tell then.
          RunTakenOver, peewee.PeeweeException: As `resynchronize`.
        """
        if self._heartbeat_at is None:
            raise error
        found = runs.resynchronize(self._run_id, self._heartbeat_at)
        self._heartbeat_at = None
        logger.warning("The connection was lost, the run continues", error=error_line(error))
        return found

    def in_transaction(
        self, stage: Stage, apply: Callable[[], BatchResult], record: Callable[[BatchResult], T]
    ) -> tuple[BatchResult, T]:
        """Commit the changes of `apply` together with what `record` writes about them, and return what both return.

        Retries after a deadlock, or what is unconfirmed.
        """
        self._heartbeat_at = None
        for tries_left in reversed(range(_TRIES)):
            try:
                with batch_span(), database.atomic():
                    result = apply()
                    self._announce(stage, result)
                    if result.confirm is not None:
                        result.confirm()
                    return result, record(result)
            except Unconfirmed:
                if not tries_left:
                    raise
            except PeeweeException as error:
                if not is_conflict(error) or not tries_left:
                    raise
                logger.warning("Batch is retried", error=shortened(error_line(error), LONGEST_ERROR))
        raise AssertionError("the last try returns or raises")

    def advance(self, counts: Counts, cursor: Cursor | None) -> Override | None:
        """Write counts and cursor in the open transaction; return the run's override."""
        return runs.advance(self._run_id, counts, cursor, self._fence)

    def close(self, verdict: tuple[Outcome, str | None], counts: Counts, cursor: Cursor | None) -> None:
        """Close the run's row in the open transaction."""
        outcome, reason = verdict
        runs.finish(self._run_id, outcome, reason, counts=counts, cursor=cursor, fence=self._fence)

    def beat(self) -> Override | None:
        """Write a heartbeat between two batches; return the run's override."""
        self._heartbeat_at = None
        with database.atomic():
            return runs.beat(self._run_id)

    def send_events(self) -> None:
        """Send the committed batch's events and deliver its outbox rows. Failed deliveries do not raise."""
        announcements, stored = self._announcements, self._stored
        self._announcements, self._stored = (), []
        for each in announcements:
            events.send(each.event, each.rows, worker=self._worker, run_id=self._run_id)
        handlers = events.subscriptions()
        for key in dict.fromkeys((row.event, row.subscription) for row in stored):
            # After a failure the run leaves this subscription to the outbox sweep, so that it cannot slow every batch.
            if key in handlers and key not in self._failing:
                self._deliver(handlers[key], [row for row in stored if (row.event, row.subscription) == key])

    def _deliver(self, handler: events.OutboxHandler, rows: Sequence[OutboxRow]) -> None:
        first = rows[0]
        about = {"subscribed_to": first.event, "subscription": first.subscription}
        try:
            outbox.deliver(handler, rows)
        except Exception as error:
            self._failing.add((first.event, first.subscription))
            logger.exception("Delivery failed, the outbox retries it", **about, error=error_line(error))
            cause = cause_of(error, about)
            if due_for_report(self._worker, cause):
                report(error, worker=self._worker, run_id=self._run_id, cause=cause, **about)
            return
        try:
            with database.atomic():
                outbox.remove(rows)
        except PeeweeException as error:
            logger.warning(
                "Could not remove delivered rows from the outbox, they are delivered again",
                **about,
                error=error_line(error),
            )

    def _call_handler(self, handler: events.TransactionHandler, each: Announcement) -> None:
        connection = database.connection()
        name = f"{getattr(handler, '__module__', '')}.{getattr(handler, '__qualname__', repr(handler))}"
        with _detect_ended_transaction(connection, name):
            try:
                # Translates psycopg2's errors to peewee's.
                with connection.lent(), __exception_wrapper__:
                    handler(connection, [dict(row) for row in each.rows], worker=self._worker, run_id=self._run_id)
            except HousekeepingError:
                raise
            except Exception as error:
                # Other errors of the database keep their kind, by which the run decides whether a row is at fault.
                other_kind = isinstance(error, PeeweeException) and kind_of(error) is not Kind.ROW
                if other_kind or caused_by(error, UNREACHABLE):
                    raise
                raise HandlerFailed(f"{name} failed for {each.event.name}: {typed_error_line(error)}") from error
            if connection.info.transaction_status == TRANSACTION_STATUS_INERROR:
                raise HandlerFailed(f"{name} left the transaction of {each.event.name} aborted by an error")

    def _collect(self, stage: Stage, result: BatchResult) -> None:
        """Keep the batch's events for `send_events`; they replace those of an attempt that was rolled back."""
        found = stage.announcements(result) if isinstance(stage, Announcing) else ()
        self._announcements, self._stored = [each for each in found if each.rows], []

    def _announce(self, stage: Stage, result: BatchResult) -> None:
        """Call the handlers within the batch's transaction, and store rows in the outbox.

        Raises:
          HandlerFailed: A handler fails, possibly because of a row.
          TransactionEnded: A handler ends the transaction, or tries to.
          Exception: Any other error of a handler, such as a lost connection. No row is at fault.
        """
        self._collect(stage, result)
        for each in self._announcements:
            for handler in events.handlers_of(each.event).within_transaction:
                self._call_handler(handler, each)
            if not each.in_outbox:
                self._stored += outbox.store_in_outbox(each.event, each.rows, worker=self._worker, run_id=self._run_id)

    def _compiled(
        self, stage: TableStage, with_rows: bool, before: Counts, all_stages: Sequence[TableStage], batch: Batch
    ) -> PreparedQuery:
        def queries() -> Sequence[Query]:
            query = self._query(stage, with_rows, before, all_stages, batch)
            return (lock_statement(stage, batch), query) if stage.locks_first else (query,)

        if batch.until is not None or not vars(type(stage)).get("builds_as_declared"):
            return PreparedQuery(*queries())
        after = None if batch.after is None else tuple(value is None for value in batch.after)
        of_stage = (type(stage), stage.name, stage.model, stage.batch_size, stage.locks_first, stage.newest_first)
        form = (of_stage, after, with_rows, "batches" in before, len(all_stages), self._fence is None, Run._meta.schema)
        inputs = Inputs.joined([each.inputs(batch) for each in (stage, *all_stages[:-1])])
        return self._texts.prepared(form, inputs, queries)

    def _query(
        self, stage: TableStage, with_rows: bool, before: Counts, all_stages: Sequence[TableStage], batch: Batch
    ) -> Query:
        width = len(batch.after or ())
        counts, cursor, heartbeat, ends_run = (
            Parameter(width + number).cast(kind)
            for number, kind in enumerate(("jsonb", "jsonb", "timestamptz", "boolean"))
        )
        run_id, *fence = (Parameter(width + number) for number in range(4, 5 + len(self._fence or ())))
        table = table_if_visible(stage.model)
        # By a declared key that is not unique, more rows change than were picked, which undoes the batch. Not by ctid.
        by_ctid = table.plain and table.is_unique(column.column_name for column in stage.key)
        picked, write = changes(stage, batch, by_ctid=by_ctid, with_texts=False)
        names = [f"n{number}" for number in range(len(write.ctes))]
        totals = [count_of(each).alias(name) for name, each in zip(names, write.ctes, strict=True)]
        last = _last_position(stage, picked).alias("position")
        # Of the statement's snapshot, in which the picked rows are stale. Not executed if the run continues.
        stale: Any = stage.probes(batch.now, stage.batch_size)[0].query if all_stages else None
        for each in all_stages[:-1]:
            stale = Case(None, [(Expression(each.probes(batch.now, 0)[0].query, OP.EQ, 0), stale)])
        is_last = ends_run & (count_of(picked) < stage.batch_size)
        left = [] if stale is None else [Case(None, [(is_last, stale)]).alias("stale")]
        columns = [last, count_of(picked).alias("picked"), *left, *totals]
        numbers = Select(columns=columns).cte("numbers", materialized=True)
        done = [getattr(numbers.c, name) for name in names]
        added = dict(zip(write.counts, done, strict=True))
        if "batches" in before:
            added["batches"] = Case(None, [(reduce(operator.add, done) > 0, 1)], 0)
        place = fn.JSONB_BUILD_OBJECT("pass", stage.name, "after", numbers.c.position)
        advanced, accepted = runs.advance_cte(
            run_id,
            fence or None,
            numbers,
            counts=counts.concat(_sums(counts, added)),
            cursor=Case(None, [(numbers.c.picked > 0, place)], cursor),
            is_done=ends_run & (numbers.c.picked < stage.batch_size),
            heartbeat=heartbeat,
            backlog=Case(None, [(numbers.c.stale == done[0], 0)]) if left else None,
        )
        is_complete = write.holds or numbers.c.picked == done[0]
        for required in (write.requires, is_as_written(write)):
            if required is not None:
                is_complete = Expression(is_complete, OP.AND, required)
        is_expected = fn.EXISTS(Select((accepted,), [SQL("1")])) & is_complete
        scalars = [
            # As text: the driver would read the JSON of each row.
            numbers.c.position.cast("text"),
            numbers.c.picked,
            advanced.c.override,
            advanced.c.stopped_by,
            advanced.c.heartbeat_at,
            advanced.c.backlog,
            Case(None, [(is_expected, "true")], REFUSED).cast("boolean"),
            *done,
        ]
        ctes = (picked, *write.before, *write.ctes, numbers, advanced, accepted)
        # Outer joins: the ledger's part is one row even if no row was picked or the run was taken over.
        of_rows = _row_columns(stage, picked, write) if with_rows else []
        query = Select((numbers,), [*of_rows, *scalars]).join(advanced, JOIN.LEFT_OUTER, on=SQL("true"))
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


@contextmanager
def _detect_ended_transaction(connection: Any, handler: str) -> Iterator[None]:
    """Raise TransactionEnded if the handler ends the transaction: a savepoint set before it is then gone."""
    database.execute_sql(f"SAVEPOINT {_SAVEPOINT}")
    try:
        yield
    except Exception as error:
        if connection.info.transaction_status != TRANSACTION_STATUS_UNKNOWN:
            _refer_to_savepoint("ROLLBACK TO", handler, error)
        raise
    _refer_to_savepoint("RELEASE", handler, None)


def _refer_to_savepoint(verb: str, handler: str, error: Exception | None) -> None:
    try:
        database.execute_sql(f"{verb} SAVEPOINT {_SAVEPOINT}")
    except PeeweeException as gone:
        if sqlstate(gone) not in _ENDED:
            if error is not None:
                return  # the caller raises the handler's error
            raise
        raise TransactionEnded(
            f"{handler} ended the batch's transaction by a statement; its changes may be committed "
            "without being counted. Remove the COMMIT or ROLLBACK from it"
        ) from error
