"""The stage of a sweep that declares its rows and its action itself, instead of `stages`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from housekeeping.sweeps.partitions.action import DropPartitions
from housekeeping.sweeps.partitions.stage import PartitionStage
from housekeeping.sweeps.stages.actions import allowed_by
from housekeeping.sweeps.stages.call import Call, CallStage
from housekeeping.sweeps.stages.hold import held_condition
from housekeeping.sweeps.stages.stage import Stage
from housekeeping.sweeps.stages.table_stage import TableStage

if TYPE_CHECKING:
    from housekeeping.sweeps.declaration import Sweep


def only_stage(sweep: Sweep) -> Stage:
    """Return the sweep's only stage: partitions, rows with a call each, or rows that one statement changes."""
    stale = None if sweep.stale is None else partial(_stale_for_action, sweep)
    if isinstance(sweep.action, DropPartitions):
        column = sweep.order[0]
        name = "partitions" if sweep.stage_name == "rows" else sweep.stage_name
        hold = None if sweep.hold is None else partial(held_condition, sweep.hold, column.model)
        return PartitionStage(name, sweep.name, column.model, column, sweep.action, stale, hold)
    stage_type: Any = CallStage if isinstance(sweep.action, Call) else TableStage
    ordered = {column.name for column in sweep.order}
    further = {each.name: each for each in sweep.event_columns.values() if each.name not in ordered}
    stage: TableStage = stage_type(
        name=sweep.stage_name,
        stale=stale,
        order=sweep.order,
        action=sweep.action,
        batch_size=sweep.batch_size,
        columns={**sweep.columns, **further},
        event=None if sweep.event is None else (sweep.event, _event_keys(sweep)),
        row_log=sweep.row_log if sweep.options.get("log_records", True) else None,
        hold=sweep.hold,
    )
    return stage


def _stale_for_action(sweep: Sweep, now: datetime) -> Any:
    """Return the predicate of the stale rows that the action can change.

    Any other row would stay stale for ever: every run would meet it, and every plan count it.
    """
    assert sweep.stale is not None
    stale: Any = sweep.stale(now - (sweep.stale_after or timedelta()))
    allowed = allowed_by(sweep.action)
    return stale if allowed is None else stale & allowed


def _event_keys(sweep: Sweep) -> Mapping[str, str] | tuple[str, ...]:
    named = {key: column.name for key, column in sweep.event_columns.items()}
    return named or tuple(column.name for column in sweep.order)
