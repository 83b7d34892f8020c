"""The statement that changes a batch: it picks and locks stale rows, changes them, and returns what happened."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from peewee import CTE, SQL, Column, Expression, IntegrityError, Query, Select, Tuple, fn

from housekeeping.core.errors import ArchiveMismatch, DeclarationError, RowNotChanged
from housekeeping.sweeps.stages.actions import Write, archiving
from housekeeping.sweeps.stages.stage import Batch, BatchResult, Failure
from housekeeping.sweeps.stages.written_key import refuse_part_of_key

if TYPE_CHECKING:
    from housekeeping.sweeps.stages.table_stage import TableStage

_NOT_CHANGED: Final = (
    "PostgreSQL left the row as it was, without an error; a trigger, a rule or a policy prevents the change"
)
_NOT_ARCHIVED: Final = (
    "nothing of the batch was changed: its table got another column during the run, or a trigger, a rule or a policy "
    "of the archive keeps rows out"
)
_CTID: Final = "row_ctid"
_NAME: Final = 63 - len("position_of_")  # bytes; PostgreSQL's longest name
#: Keys of the rows that `lock_statement` has locked in this transaction; NULL if it has locked none.
LOCKED_KEYS: Final = SQL("nullif(current_setting('housekeeping.batch', true), '')::bigint[]")


def lock_statement(stage: TableStage, batch: Batch) -> Query:
    """Return the statement that locks the rows of a batch, for a stage that `locks_first`."""
    rows = stage.rows(batch).for_update(skip_locked=True).cte("locked_rows", materialized=True)
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
    picked = rows.for_update(skip_locked=True).cte("picked", materialized=True)
    if by_ctid:
        chosen: Any = _ctid(stage) == fn.ANY(fn.ARRAY(Select((picked,), [getattr(picked.c, _CTID)])))
    else:
        chosen = stage.among(picked)
    # Compare-and-set: a row is changed only if it is still stale then. COALESCE keeps PostgreSQL from using this
    # condition for an index: with old statistics it would read all stale rows for each row of the batch.
    still_stale = fn.COALESCE(stage.stale(batch.now), False)
    write = stage.action.write(stage, batch, chosen & still_stale)
    action = archiving(stage.action)
    if action is not None and write.requires is None:
        raise DeclarationError(
            f"{stage.name}: {type(action).__name__} has archive_to={action.archive_to!r}, but its `write` archives no "
            "row; begin it with super().write(table, batch, chosen)"
        )
    names = tuple(stage.action.counted_as)[: len(write.ctes)]
    if tuple(write.counts) != names or len(names) != len(write.ctes):
        raise DeclarationError(
            f"{stage.name}: the counts of its action's Write are {', '.join(write.counts) or 'none'}; they should "
            f"be one for each statement, as counted_as begins: {', '.join(names)}"
        )
    refuse_part_of_key(stage, write)
    return picked, write


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


def checked_statement(stage: TableStage, batch: Batch) -> Query:
    """Return the statement of a batch that also tells which of the picked rows it has changed."""
    picked, write = changes(stage, batch)
    conditions = [
        SQL("NULL::boolean") if condition is None else Select(columns=[condition])
        for condition in (write.holds, write.requires)
    ]
    numbers = (*conditions, *(count_of(each) for each in write.ctes))
    texts = [picked.c[text_of(column)] for column in stage.as_text]
    query = Select((picked,), (*columns_of(stage, picked), *texts, is_changed(stage, picked, write), *numbers))
    return query.order_by(*stage.directed(order_of(stage, picked))).with_cte(picked, *write.before, *write.ctes)


def checked_result(stage: TableStage, batch: Batch, rows: list[tuple[Any, ...]]) -> BatchResult:
    """Return the result of a `checked_statement`. A picked row that was not changed counts as failed.

    Raises:
      DeclarationError, IntegrityError: The action has changed more rows than were picked, or the condition of its
        `Write` does not hold; the batch must be undone.
      ArchiveMismatch: The condition of its `Write` that no row can cause does not hold; likewise.
    """
    if not rows:
        return BatchResult(counted(stage, ()), *stage.position_after(batch, None, 0))
    flag = len(stage.order) + len(stage.columns) + len(stage.as_text)
    holds, required, *numbers = rows[0][flag + 1 :]
    if required is False:
        raise ArchiveMismatch(f"{stage.name}: {_NOT_ARCHIVED}")
    if holds is False:
        raise IntegrityError(f"{stage.name}: not all rows that belong together did change")
    changed = [row for row in rows if row[flag]]
    _refuse_more_rows(stage, batch, len(rows), len(changed), numbers[0])
    kept = [] if holds else [stage.describe(stage.position_of(row)) for row in rows if not row[flag]]
    return BatchResult(
        counted(stage, numbers),
        *stage.position_after(batch, stage.position_of(rows[-1]), len(rows)),
        rows=stage.records(changed) if stage.needs_rows() else (),
        failures=[Failure(record, RowNotChanged(_NOT_CHANGED)) for record in kept],
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


def text_of(column: Any) -> str:
    """Return the alias of a column's text form in the query of `TableStage.rows`."""
    name: str = column.column_name
    # PostgreSQL would shorten a longer alias, and the driver would return it by the shortened name.
    return f"position_of_{name if len(name.encode()) <= _NAME else hashlib.sha256(name.encode()).hexdigest()[:16]}"


def key_is_among(key: Sequence[Any], picked: CTE) -> Expression:
    """Return the condition that a row has the key of a picked row."""
    chosen = Select((picked,), [picked.c[column.column_name] for column in key])
    if len(key) > 1:
        several: Expression = Tuple(*key).in_(chosen)
        return several
    # An array instead of a join, for which PostgreSQL may read the whole table.
    single: Expression = key[0] == fn.ANY(fn.ARRAY(chosen))
    return single


def _ctid(stage: TableStage) -> Column:
    meta: Any = stage.model._meta
    return Column(meta.table, "ctid")
