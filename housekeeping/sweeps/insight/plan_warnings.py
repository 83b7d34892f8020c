"""Warnings of a plan about stale rows that look like a mistake in the predicate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date, datetime
from typing import Any, Final

from housekeeping.sweeps.stages.keyset import may_be_null
from housekeeping.sweeps.stages.stage import Backlog, Stage, StagePlan
from housekeeping.sweeps.stages.table_stage import TableStage

_COUNTED: Final = 100_000  # rows counted at most for a warning


def warnings_of(stage: Stage, planned: StagePlan, now: datetime) -> Iterator[str]:
    """Yield what is unusual about the stale rows of a stage: times in the future, rows without a time."""
    if not isinstance(stage, TableStage) or not planned.stale.rows:
        return
    column, newest = stage.order[0], planned.newest
    today: date = now if isinstance(newest, datetime) else now.date()
    if isinstance(newest, date) and newest > today:
        found = _count(stage, now, column > today)
        yield f"{found} in the future ({column.name}); check the direction of the comparison in `stale`"
    if may_be_null(column, stage.stale(now)) and (found := _count(stage, now, column.is_null())):
        yield f"{found} NULL in {column.name}; a run takes such rows last"


def _count(stage: TableStage, now: datetime, condition: Any) -> str:
    """Return how many stale rows meet the condition, as the beginning of a sentence; empty if none does."""
    found = replace(stage, stale=lambda at: stage.stale(at) & condition).backlog(now, _COUNTED)
    return f"{found} stale {'row is' if found == Backlog(1) else 'rows are'}" if found.rows else ""
