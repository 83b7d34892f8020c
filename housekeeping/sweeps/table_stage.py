"""Stage of one table, and the statement of its batch, which picks, locks and changes stale rows."""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial, reduce
from typing import Any, ClassVar, Final, Protocol, Self

from peewee import (
    CTE,
    OP,
    SQL,
    Alias,
    Column,
    Context,
    Delete,
    Expression,
    Field,
    IntegrityError,
    Model,
    PostgresqlDatabase,
    Query,
    RawQuery,
    Select,
    SelectBase,
    Tuple,
    Update,
    fn,
)

from housekeeping.core import events
from housekeeping.core.errors import ArchiveMismatch, DeclarationError, RowNotChanged
from housekeeping.core.events import Event
from housekeeping.core.logs import log_rows
from housekeeping.database.catalog import is_absent, remove_absent_fields, table_if_visible
from housekeeping.database.connection import database, select_within
from housekeeping.database.queries import UNDONE, CompiledQuery, Inputs, has_written_values
from housekeeping.sweeps.keyset import LOCKED_KEYS, ExceptHeld, TableRows, is_true, text_of
from housekeeping.sweeps.stage import (
    Announcement,
    Backlog,
    Batch,
    BatchResult,
    ExpectedChange,
    ExplainQuery,
    Failure,
    Position,
    RowLog,
    Stage,
    StagePlan,
)

#: Name of the count of rows that were inserted into an archive.
ARCHIVED_ROWS: Final = "archived_rows"


@dataclass(frozen=True, slots=True)
class Write:
    """The part of a batch's statement that changes rows.

    Attributes:
      ctes: Data-modifying CTEs. The first changes the picked rows and returns their keys; others change dependent rows.
      counts: Name of the row count of each CTE.
      before: Further CTEs that these refer to.
      holds: Condition that must be true after the changes; otherwise the batch is rolled back. With a condition, picked
        rows may stay unchanged, because another session works on them. Without one, such a row counts as failed.
      requires: Condition that must be true after the changes; otherwise the batch is rolled back and the run fails.
        For a condition that no single row can break.
    """

    ctes: Sequence[CTE]
    counts: Sequence[str]
    before: Sequence[CTE] = ()
    holds: Expression | None = None
    requires: Expression | None = None


class Action(Protocol):
    """Change that a sweep makes to the stale rows of a batch.

    An action may also have ``fallback(table, batch, error)``, which processes the single row of `Batch.only` in another
    way after this error. It returns the result, or None if there is no other way.
    """

    @property
    def counted_as(self) -> Sequence[str]:
        """Names of the row counts of the action, in display order."""

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        """Return the part of the statement that changes the rows matching `chosen`: picked, and still stale."""


def archiving_part(action: Any) -> Any:
    """Return the part of an action that moves rows to an archive, the change after a call too; None without one."""
    part = getattr(action, "then", action)
    return None if getattr(part, "archive_to", None) is None else part


def counts_of(action: Any) -> tuple[str, ...]:
    """Return the names of all counts of a stage with this action, in display order."""
    of_each = hasattr(action, "function") or _has_dependents(action)
    return (*action.counted_as, *(("failed",) if of_each else ()), "batches", "out_of_time")


def progress_of(action: Any) -> tuple[str, ...]:
    """Return the names of the counts of a stage with this action that are processed rows."""
    counted_as = tuple(action.counted_as)
    if not _has_dependents(action):
        return counted_as[:1]
    return (counted_as[0], *(each for each in counted_as if each.endswith("_dependents")))


def _has_dependents(action: Any) -> bool:
    return getattr(getattr(action, "then", action), "dependents", None) is not None


_SAMPLES: Final = 5
#: Placeholder for the condition of the chosen rows, if only the other parts of an action's statements are needed.
_ANY: Final = Expression(SQL("TRUE"), OP.AND, SQL("TRUE"))


@dataclass(frozen=True, slots=True)
class Probe:
    """Query of one value, which one statement can send together with others.

    Attributes:
      read: Converts the value that the driver returns.
    """

    query: Any
    read: Callable[[Any], Any]


def read_together(probes: Sequence[Sequence[Probe]], *, within: timedelta | None = None) -> list[list[Any]]:
    """Return the values of groups of probes, read by one statement.

    Parameters:
      within: Time limit of the statement, and of its waits for locks; None for that of the session.
    """
    queries = [each.query for group in probes for each in group]
    if not queries:
        rows: list[Any] = [()]
    elif within is None:
        rows = CompiledQuery(Select(columns=queries)).rows()
    else:
        text, values = database.get_sql_context().sql(Select(columns=queries)).query()
        rows = select_within(text, values, within)
    found = iter(rows[0])
    return [[each.read(next(found)) for each in group] for group in probes]


@dataclass(frozen=True, kw_only=True)
class TableStage(TableRows):
    """Stage that processes the rows of one table. Rows that another transaction has locked are skipped.

    Attributes:
      action: What is done with the stale rows of a batch.
      event: The event announced with the changed rows of each batch. Its columns are keys of the row.
      row_log: The log line of each changed row.
      counts: Names of the counts of a run, in display order. Default: those of the action, ``batches`` and
        ``out_of_time``.
      progress_counts: The counts that are processed rows. Default: the first of the action.
      start_message: Info line logged when a run begins.
      locks_first: Whether the rows are locked by a statement of their own, so that the one that changes them sees
        everything that was committed before the locks. Only for a table whose key is one integer.
    """

    #: Whether the time of a batch is that of its transaction, so that it says how large the next one may be.
    is_timed: ClassVar[bool] = True
    #: Whether statements depend only on the declaration and `inputs`, so that they can be reused. A derived class has
    #: this only if it sets it itself.
    builds_as_declared: ClassVar[bool] = True

    action: Action
    event: Event | None = None
    row_log: RowLog | None = None
    locks_first: bool = False
    counts: tuple[str, ...] = ()
    progress_counts: tuple[str, ...] = ()
    start_message: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "counts", self.counts or counts_of(self.action))
        object.__setattr__(self, "progress_counts", self.progress_counts or progress_of(self.action))

    def on_real_columns(self) -> Self:
        """Return the stage without the optional columns that its table lacks, also in log lines and events.

        Its action may depend on the table's columns as well.

        Raises:
          peewee.PeeweeException: If the database cannot be read.
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
            event = Event(event.signal, **{name: key for name, key in event.columns.items() if key not in absent})
        columns = {key: column for key, column in self.columns.items() if key not in absent}
        return replace(self, action=action, columns=columns, row_log=row_log, event=event)

    def with_holds(self, holding: Callable[[], Iterable[tuple[str, str, Any]]]) -> Self:
        """Return the stage with the holds of these stages, for one that deletes rows of further tables.

        Parameters:
          holding: Yields the name and the database of a sweep, and a stage of it that has a hold.
        """
        return self

    def archives(self) -> dict[type[Model], type[Model]]:
        """Return the archives of the stage's tables, with their tables, if they are not that of its action alone."""
        return {}

    @property
    def locked_keys(self) -> SQL:
        """Array of the keys of the batch's rows, for the action of a stage that `locks_first`."""
        return LOCKED_KEYS

    @property
    def is_distributed(self) -> bool:
        """Whether the rows are in shards of Citus, which locks none for a query on several of them.

        A batch then picks its rows without locks. Its change compares each with the predicate and the hold once more.
        """
        return table_if_visible(self.model).is_distributed

    def locking(self, batch: Batch, rows: Any) -> Any:
        if self.is_distributed:
            return rows
        lock = self.statements.get(self.purpose(batch), "lock", lambda: lock_of(self, batch))
        return rows.for_update(lock, skip_locked=True)

    def among(self, picked: CTE) -> Expression:
        """Return the condition that a row is one of the picked rows."""
        keys = Select((picked,), [picked.c[column.column_name] for column in self.key])
        # An array instead of a join, for which PostgreSQL may read the whole table.
        found: Expression = Tuple(*self.key).in_(keys) if len(self.key) > 1 else self.key[0] == fn.ANY(fn.ARRAY(keys))
        return found

    def prepare(self, batch: Batch) -> Any:
        """Do nothing: one statement reads and changes the rows."""

    def apply(self, batch: Batch, prepared: Any = None) -> BatchResult:
        """Select, lock and change the rows in one statement. The result has them only if `needs_rows` says so."""
        if self.locks_first:
            self.run_statement(batch, "lock", partial(lock_statement, self))
        return checked_result(self, batch, self.run_statement(batch, "apply", partial(checked_statement, self)))

    def expected(self, batch: Batch, prepared: Any) -> ExpectedChange | None:
        """Return the change that `apply` will probably make; None if it is not known before."""
        return None

    def inputs(self, batch: Batch) -> Inputs:
        """Return the inputs of predicate, hold and action in the statements of a run."""

        def compiled() -> Inputs:
            write = self.action.write(self, batch, _ANY)
            conditions = [each for each in (write.holds, write.requires) if each is not None]
            first = replace(batch, after=None)
            return Inputs.of(
                [
                    self.rows(first, locks=False, with_texts=False),
                    Select(columns=conditions or [SQL("1")]).with_cte(*write.before, *write.ctes),
                ]
            )

        return self.statements.get(self.purpose(batch), "inputs", compiled)

    def needs_rows(self) -> bool:
        """Return whether the changed rows must be returned, for log lines or for a listener of the event."""
        written = self.row_log is not None and logging.getLogger(__name__).isEnabledFor(self.row_log.level)
        return written or (self.event is not None and events.has_listeners(self.event.signal))

    def calls_handlers(self) -> bool:
        """Return whether the stage's event has handlers in the transaction of each batch, or an outbox."""
        if self.event is None:
            return False
        handlers = events.handlers_of(self.event.signal)
        return bool(handlers.within_transaction or handlers.outbox)

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        if self.row_log is not None:
            fields, constants = self.row_log.fields.items(), self.row_log.constants
            each = [{**{name: row[key] for name, key in fields}, **constants} for row in result.rows]
            log_rows(__name__, self.row_log.level, self.row_log.event, each)

    def announcements(self, result: BatchResult) -> Sequence[Announcement]:
        """Return the event of the changed rows, if the stage has one and they were read back."""
        if self.event is None or not events.has_listeners(self.event.signal):
            return ()
        named = self.event.columns.items()
        return [Announcement(self.event.signal, [{name: row[key] for name, key in named} for row in result.rows])]

    def positions(self, batch: Batch, prepared: Any = None) -> list[Position]:
        found = CompiledQuery(self.locking(batch, self.rows(batch))).rows()
        return [self.position_of(row) for row in found]

    def after_all(self, batch: Batch, prepared: Any, positions: Sequence[Position]) -> BatchResult:
        last = positions[-1] if positions else None
        return BatchResult({}, *self.position_after(batch, last, len(positions)))

    def fallback(self, batch: Batch, error: BaseException) -> BatchResult | None:
        fallback = getattr(self.action, "fallback", None)
        return None if fallback is None else fallback(self, batch, error)

    def resumes_at(self, position: Position | None) -> Position | None:
        """Return where the next run resumes if this one leaves the stage after the row at a position."""
        return position

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        counted: Backlog = read_together([[self._number(now, limit)]])[0][0]
        return counted

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        return read_together([[self._edge(now)]])[0][0]

    def probes(self, now: datetime, limit: int) -> list[Probe]:
        """Return the queries of `backlog` and `oldest`, to be sent with those of other stages.

        With a hold, a third one counts the rows on hold among the first `limit` stale ones.
        """
        return [self._number(now, limit), self._edge(now), *self._held(now, limit)]

    def explain_queries(self, now: datetime) -> list[ExplainQuery]:
        batch = Batch("", None, now)
        query = self.locking(batch, self.rows(batch))
        return [ExplainQuery(f"the query of stage {self.name}", query, self.model, self.order)]

    def statements_of_a_run(self, now: datetime) -> list[Query]:
        """Return the statements that change the rows of a batch, for `housekeeping doctor`. Executes none of them."""
        return [checked_statement(self, Batch("", None, now))]

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        [[newest, stale, oldest, *held]] = read_together([[self._edge(now, newest=True), *self.probes(now, limit)]])
        samples = CompiledQuery(self.rows(Batch("", None, now), locks=False).limit(_SAMPLES)).rows()
        counted = [self.action.counted_as[0], *([] if archiving_part(self.action) is None else [ARCHIVED_ROWS])]
        return StagePlan(
            self.name,
            stale,
            dict.fromkeys(counted, stale.rows),
            oldest,
            newest,
            [self.describe(self.position_of(row)) for row in samples],
            *held,
        )

    def _number(self, now: datetime, limit: int) -> Probe:
        query = Select((self.first_stale(now, [SQL("1")], limit + 1),), [fn.COUNT(SQL("1"))])
        return Probe(query, lambda rows: Backlog(min(rows, limit), rows <= limit))

    def _held(self, now: datetime, limit: int) -> list[Probe]:
        if not isinstance(self.stale, ExceptHeld):
            return []
        stale = self.first_stale(now, [self.stale.condition(now)], limit + 1, self.stale.stale)
        numbers = fn.JSON_BUILD_ARRAY(fn.COUNT(SQL("1")), fn.COUNT(SQL("1")).filter(stale.c.c0))
        return [Probe(Select((stale,), [numbers]), lambda found: Backlog(found[1], found[0] <= limit))]

    def _edge(self, now: datetime, *, newest: bool = False) -> Probe:
        stale = self.stale(now)
        groups = self.groups(stale)
        column, *others = self.order if groups is None else self.order[1:]
        rows: Any = self.model.select(column)
        if newest:  # rows with NULL come last, so they would be the first ones in the reverse order
            rows = rows.where(column.is_null(False)).order_by(column.desc(), *(each.desc() for each in others))
        else:
            rows = rows.order_by(column, *others)
        if groups is None:
            found = rows.where(stale).limit(1)
        else:
            each = groups.select(rows, [column], None, of_each=1)
            edge = each.c.c0.desc() if newest else each.c.c0
            found = Select((each,), [each.c.c0]).order_by(edge).limit(1)

        def read(value: Any) -> Any:
            value = column.python_value(value)
            # A column without a time zone is read as UTC, as the sessions do.
            return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value

        return Probe(found, read)


def backlog_of(stages: Sequence[Stage], now: datetime, limit: int) -> Backlog:
    """Return the stale rows of stages, counted up to the limit for each, by one statement where that is possible."""
    probes, waiting = [], Backlog(0)
    for each in stages:
        if isinstance(each, TableStage) and counts_rows(each):
            probes.append(each.probes(now, limit)[:1])
        else:
            waiting += each.backlog(now, limit)
    return sum((number for [number] in read_together(probes)), waiting)


def counts_rows(stage: TableStage) -> bool:
    """Return whether the stage's backlog is the number that its first probe counts."""
    return type(stage).backlog is TableStage.backlog


def refuse_other_rows(stage: TableStage, write: Write) -> None:
    """Reject statements that may change rows outside of the batch.

    The first statement returns the whole key of the rows it changes. Each further one that changes rows reads that key,
    or what another one of these returns.

    Raises:
      DeclarationError: A statement uses only a part of the key, or does not read the rows that are changed.
    """
    first, others = write.ctes[0], write.ctes[1:]
    key = [column.column_name for column in stage.key]
    returned = _returned(first)
    if returned is not None and not set(key) <= set(returned):
        raise DeclarationError(
            f"{stage.name}: the first statement of its action's Write returns {_listed(returned)}, but rows of "
            f"{stage.model.__name__} are identified by {_listed(key)}; write .returning(*table.key)"
        )
    if not others:
        return
    reads = {id(each): _Reads(each) for each in (*write.before, *others)}
    followed: list[CTE] = [first]
    for _ in reads:  # as often as the longest chain
        followed = [first, *(read.cte for read in reads.values() if read.follows(followed, key))]
    for number, other in enumerate(others, start=2):
        if not isinstance(reads[id(other)].query, SelectBase) and not any(other is each for each in followed):
            name = _name(first)
            columns = ", ".join(f"{name}.c.{column}" for column in key)
            raise DeclarationError(
                f"{stage.name}: statement {number} of its action's Write ({_name(other)}) does not compare its rows "
                f"with the whole key {_listed(key)} of the rows that the first one ({name}) has changed, so it would "
                "also change what belongs to rows that are locked or on hold; compare them: "
                f"{'column' if len(key) == 1 else 'Tuple(...)'}.in_({name}.select({columns}))"
            )


def _name(cte: CTE) -> str:
    return str(getattr(cte, "_alias", "first"))


def _listed(names: Sequence[str]) -> str:
    return f"({', '.join(names)})" if names else "nothing"


def _returned(cte: Any) -> list[str] | None:
    """Return the names of the columns that a statement returns; None if unknown, as for raw SQL."""
    if cte._columns or not hasattr(cte._query, "_returning"):
        return None
    names = []
    for each in cte._query._returning or ():
        if isinstance(each, Field):
            names.append(each.column_name)
        elif isinstance(each, Alias | Column):
            names.append(each.name)
        else:
            return None
    return names


class _Reads(Context):
    """What the statement of a CTE reads from others: their columns, or anything that raw SQL names."""

    def __init__(self, cte: CTE) -> None:
        super().__init__(**PostgresqlDatabase(None).get_context_options())
        self.cte = cte
        self.query: Any = cte._query  # type: ignore[attr-defined]
        self._columns: list[tuple[Any, str]] = []
        self._from: list[Any] = []
        self._raw = ""
        self.sql(self.query)

    def sql(self, obj: Any) -> Any:
        if isinstance(obj, Column):
            self._columns.append((obj.source, obj.name))
        elif isinstance(obj, CTE):
            self._from.append(obj)
        elif isinstance(obj, SQL | RawQuery):
            raw: Any = obj
            self._raw += f" {raw.sql if isinstance(obj, SQL) else raw._sql}"
        return super().sql(obj)

    def columns_of(self, cte: CTE) -> set[str]:
        """Return the names of the columns that it reads from a CTE."""
        return {name for source, name in self._columns if source is cte}

    def follows(self, others: Sequence[CTE], key: Sequence[str]) -> bool:
        """Return whether it reads the rows of any of these CTEs. A change of rows needs the whole key of the first."""
        first, needed = others[0], set(key) if isinstance(self.query, Update | Delete) else set()
        return any(
            self._reads_by_raw_sql(each) or ((read := self.columns_of(each)) and (each is not first or needed <= read))
            for each in others
        )

    def _reads_by_raw_sql(self, cte: CTE) -> bool:
        all_columns = "*" in self._raw and any(each is cte for each in self._from)
        return all_columns or re.search(rf"\b{re.escape(_name(cte))}\b", self._raw) is not None


NOT_CHANGED: Final = (
    "PostgreSQL left the row as it was, without an error; a trigger, a rule or a policy prevents the change"
)
NOT_ARCHIVED: Final = (
    "nothing of the batch was changed: its table got another column during the run, or a trigger, a rule or a policy "
    "of the archive keeps rows out"
)
_CTID: Final = "row_ctid"
#: Column of a CTE of a `Write`: whether the row has the values that were written to it.
AS_WRITTEN: Final = "is_as_written"


def lock_statement(stage: TableStage, batch: Batch) -> Query:
    """Return the statement that locks the rows of a batch, for a stage that `locks_first`."""
    rows = stage.locking(batch, stage.rows(batch)).cte("locked_rows", materialized=True)
    key = rows.c[stage.key[0].column_name]
    keys = Select((rows,), [fn.COALESCE(fn.ARRAY_AGG(key).cast("text"), "{}")])
    return Select(columns=[fn.SET_CONFIG("housekeeping.batch", keys, True)]).with_cte(rows)


def changes(stage: TableStage, batch: Batch, *, by_ctid: bool = False, with_texts: bool = True) -> tuple[CTE, Write]:
    """Return the CTE of the batch's locked rows, and the action's CTEs that change them.

    The first is materialized: PostgreSQL may run a subquery with ``LIMIT`` once for each row of the outer statement,
    and so change more rows than the batch has.

    Parameters:
      by_ctid: Find the picked rows by their place in the table, without the index. A row that another session has
        changed since the statement began is then picked, but not changed. Only for a table that is `Table.plain`.
      with_texts: See `TableStage.rows`.
    """
    rows = stage.rows(batch, is_locked=stage.locks_first, with_texts=with_texts)
    if by_ctid:
        rows = rows.select_extend(_ctid(stage).alias(_CTID))
    picked = stage.locking(batch, rows).cte("picked", materialized=True)
    if by_ctid:
        chosen: Any = _ctid(stage) == fn.ANY(fn.ARRAY(Select((picked,), [getattr(picked.c, _CTID)])))
    else:
        chosen = stage.among(picked)
    # Compare-and-set: a row is changed only if it is still stale then. COALESCE keeps PostgreSQL from using this
    # condition for an index: with old statistics it would read all stale rows for each row of the batch.
    # Citus refuses a COALESCE of now(), or of what a subquery has found.
    stale = stage.stale(batch.now)
    still_stale = is_true(stale) if stage.is_distributed else fn.COALESCE(stale, False)
    write = stage.action.write(stage, batch, chosen & still_stale)
    part = archiving_part(stage.action)
    if part is not None and write.requires is None:
        raise DeclarationError(
            f"{stage.name}: {type(part).__name__} has archive_to={part.archive_to!r}, but its `write` archives no "
            "row; begin it with super().write(table, batch, chosen)"
        )
    if stage.is_distributed and write.holds is None:
        write = replace(write, holds=_ANY)  # another session may have changed a picked row
    names = tuple(stage.action.counted_as)[: len(write.ctes)]
    if tuple(write.counts) != names or len(names) != len(write.ctes):
        raise DeclarationError(
            f"{stage.name}: the counts of its action's Write are {', '.join(write.counts) or 'none'}; they should "
            f"be one for each statement, as counted_as begins: {', '.join(names)}"
        )
    refuse_other_rows(stage, write)
    return picked, write


def lock_of(stage: TableStage, batch: Batch) -> str:
    """Return the lock that the action of a stage needs on its rows.

    ``FOR UPDATE`` waits for, and here skips, a row that another session inserts a dependent row for. Only what deletes
    the rows, may change their key, or changes dependent rows along needs it.
    """
    write = stage.action.write(stage, batch, _ANY)
    update: Any = write.ctes[0]._query if len(write.ctes) == 1 else None  # type: ignore[attr-defined]
    if not isinstance(update, Update):
        return "FOR UPDATE"
    unique = {name for key in table_if_visible(stage.model).keys for name in key}
    unique.update(column.column_name for column in stage.key)
    written = {getattr(column, "column_name", column) for column in update._update}  # type: ignore[attr-defined]
    return "FOR UPDATE" if unique & written else "FOR NO KEY UPDATE"


def count_of(cte: CTE) -> Select:
    """Return the number of rows of a CTE."""
    return Select((cte,), [fn.COUNT(SQL("*"))])


def columns_of(stage: TableStage, picked: CTE) -> list[Any]:
    """Return the columns of the picked rows, as `TableStage.rows` selects them without texts."""
    return [picked.c[column.column_name] for column in (*stage.order, *stage.columns.values())]


def order_of(stage: TableStage, picked: CTE | Select) -> list[Any]:
    """Return the order of the picked rows."""
    return [picked.c[column.column_name] for column in stage.order]


def is_changed(stage: TableStage, picked: CTE, write: Write) -> Expression:
    """Return whether a picked row was changed."""
    changed = write.ctes[0]
    key = [picked.c[column.column_name] for column in stage.key]
    done = Select((changed,), [changed.c[column.column_name] for column in stage.key])
    found: Expression = key[0].in_(done) if len(key) == 1 else Tuple(*key).in_(done)
    return found


def is_as_written(write: Write) -> Any:
    """Return whether each changed row has the values that were written to it; None if nothing can be compared."""
    undone = [
        fn.EXISTS(Select((cte,), [SQL("1")]).where(~getattr(cte.c, AS_WRITTEN)))
        for cte in (*write.before, *write.ctes)
        if _returns_whether_written(cte)
    ]
    return ~reduce(operator.or_, undone) if undone else None


def _returns_whether_written(cte: Any) -> bool:
    """Return whether the CTE has the column `AS_WRITTEN`. That of an UPDATE is given it."""
    query = cte._query
    returned = tuple(getattr(query, "_returning", None) or ())
    if returned and getattr(returned[-1], "_alias", None) == AS_WRITTEN:
        return True
    written = has_written_values(query) if isinstance(query, Update) and returned else None
    if written is None:
        return False
    cte._query = query.returning(*returned, written.alias(AS_WRITTEN))
    return True


def checked_statement(stage: TableStage, batch: Batch) -> Query:
    """Return the statement of a batch that also tells which of the picked rows it has changed."""
    picked, write = changes(stage, batch)
    conditions = [
        SQL("NULL::boolean") if condition is None else Select(columns=[condition])
        for condition in (write.holds, write.requires, is_as_written(write))
    ]
    numbers = (*conditions, *(count_of(each) for each in write.ctes))
    texts = [picked.c[text_of(column)] for column in stage.as_text]
    query = Select((picked,), (*columns_of(stage, picked), *texts, is_changed(stage, picked, write), *numbers))
    return query.order_by(*stage.directed(order_of(stage, picked))).with_cte(picked, *write.before, *write.ctes)


def checked_result(stage: TableStage, batch: Batch, rows: list[tuple[Any, ...]]) -> BatchResult:
    """Return the result of a `checked_statement`. A picked row that was not changed counts as failed.

    Raises:
      DeclarationError: The action has changed more rows than were picked; the batch must be undone.
      IntegrityError: The condition `Write.holds` is false, so rows that belong together did not all change; likewise.
      ArchiveMismatch: The condition `Write.requires` is false, so the archive lacks some of the rows; likewise.
      RowNotChanged: A row has other values than were written to it; likewise.
    """
    if not rows:
        return BatchResult(counted(stage, ()), *stage.position_after(batch, None, 0))
    flag = len(stage.order) + len(stage.columns) + len(stage.as_text)
    holds, required, as_written, *numbers = rows[0][flag + 1 :]
    if required is False:
        raise ArchiveMismatch(f"{stage.name}: {NOT_ARCHIVED}")
    if as_written is False:
        raise RowNotChanged(UNDONE)
    if holds is False:
        raise IntegrityError(f"{stage.name}: not all rows that belong together did change")
    changed = [row for row in rows if row[flag]]
    _refuse_more_rows(stage, batch, len(rows), len(changed), numbers[0])
    kept = [] if holds else [stage.describe(stage.position_of(row)) for row in rows if not row[flag]]
    return BatchResult(
        counted(stage, numbers),
        *stage.position_after(batch, stage.position_of(rows[-1]), len(rows)),
        rows=stage.records(changed) if stage.needs_rows() else (),
        failures=[Failure(record, RowNotChanged(NOT_CHANGED)) for record in kept],
    )


def _refuse_more_rows(stage: TableStage, batch: Batch, picked: int, allowed: int, changed: int) -> None:
    if batch.only is not None and picked > len(batch.only):
        changed, allowed = picked, len(batch.only)
    if changed > allowed:
        key = ", ".join(column.column_name for column in stage.key)
        raise DeclarationError(
            f"{stage.name}: the action would change {changed} rows for a batch of {allowed}; nothing was changed. "
            f"Either the key ({key}) of {stage.model.__name__} is not unique, then declare the table's real key; "
            "or the action changes rows outside of its batch, then compare all columns of the key"
        )


def counted(stage: TableStage, numbers: Sequence[int]) -> dict[str, int]:
    """Return the counts of a batch by name; counts that its statement lacks are 0."""
    names = stage.action.counted_as
    return {**dict.fromkeys(names, 0), **dict(zip(names, numbers, strict=False))}


def _ctid(stage: TableStage) -> Column:
    meta: Any = stage.model._meta
    return Column(meta.table, "ctid")
