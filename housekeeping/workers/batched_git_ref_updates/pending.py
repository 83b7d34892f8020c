"""Statements on the rows of deletions that are pending."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peewee import SQL, Select, Tuple, fn

from housekeeping.sweeps import database, statement_time
from housekeeping.workers.batched_git_ref_updates.models import Deletion, DeletionStatus, machine

#: A row's id and its ref.
Row = tuple[int, str]


def pending_rows(project_id: int, after: int | None, limit: int, until: int | None = None) -> list[Row]:
    """Return up to `limit` of a project's pending rows with ids above `after` and up to `until`, in order of id."""
    query: Any = in_order(project_id, after).limit(limit)
    if until is not None:
        query = query.where(Deletion.id <= until)
    return list(query.tuples())


def pending_among(project_id: int, rows: Sequence[Row]) -> set[Row]:
    """Return the rows that are still pending."""
    return set(_unchanged(project_id, rows).tuples()) if rows else set()


def mark_processed(project_id: int, rows: Sequence[Row]) -> list[Row]:
    """Mark the rows that are still pending and not locked as processed, and return them; one statement."""
    locked = _unchanged(project_id, rows).for_update(skip_locked=True).cte("locked", materialized=True)
    query: Any = (
        Deletion.update(
            {Deletion.status: machine.target("process"), Deletion.updated_at: statement_time(Deletion.updated_at)}
        )
        # Project and ids again, for the index. The ref, because an id is not unique in a partitioned table.
        .where(
            (Deletion.project_id == project_id)
            & Deletion.id.in_([id for id, _ in rows])
            & Tuple(Deletion.id, Deletion.ref).in_(Select((locked,), (locked.c.id, locked.c.ref)))
            & Deletion.status.in_(machine.sources("process"))
        )
        .returning(Deletion.id, Deletion.ref)
        .with_cte(locked)
        .tuples()
    )
    return sorted(query.execute())


def count_pending_rows(project_id: int | None, limit: int) -> int:
    """Return the number of pending rows of a project, or of all projects, counted up to `limit`."""
    predicate = Deletion.status == DeletionStatus.pending if project_id is None else _pending_of(int(project_id))
    query: Any = Deletion.select(SQL("1")).where(predicate).limit(limit).select_from(fn.COUNT(SQL("1")))
    number: int = next(iter(query.tuples().execute(database)))[0]
    return number


def in_order(project_id: int, after: int | None = None) -> Any:
    """Return the query of a project's pending rows with ids above `after`, in order of id."""
    # A range with one project instead of an equality: with an equality, PostgreSQL may scan the primary key in order
    # of id, past all rows of other projects and all processed rows.
    pending = Deletion.project_id.between(project_id, project_id) & (Deletion.status == DeletionStatus.pending)
    if after is not None:
        pending &= Tuple(Deletion.project_id, Deletion.id) > Tuple(project_id, after)
    return Deletion.select(Deletion.id, Deletion.ref).where(pending).order_by(Deletion.project_id, Deletion.id)


def _pending_of(project_id: int) -> Any:
    return (Deletion.project_id == project_id) & (Deletion.status == DeletionStatus.pending)


def _unchanged(project_id: int, rows: Sequence[Row]) -> Any:
    """Select the rows that are pending and unchanged; a swap of refs among these rows counts as unchanged."""
    ids, refs = zip(*rows, strict=True)
    unchanged = Deletion.id.in_(ids) & Deletion.ref.in_(sorted(set(refs)))
    return Deletion.select(Deletion.id, Deletion.ref).where(_pending_of(project_id) & unchanged)
