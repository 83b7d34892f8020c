"""Hint for a sweep that deletes the rows of whole partitions, which could be dropped instead."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from peewee import OperationalError

from housekeeping.core.errors import DeclarationError
from housekeeping.database.connection import sqlstate
from housekeeping.database.time_limit import time_limit
from housekeeping.sweeps.partitions.catalog import Partition, read_partitions
from housekeeping.sweeps.partitions.must_stay import Keeping, fails, reason_of_rows
from housekeeping.sweeps.stages.actions import Delete
from housekeeping.sweeps.stages.stage import Stage
from housekeeping.sweeps.stages.table_stage import TableStage

#: Partitions that are looked at, the oldest ones.
_EXAMINED: Final = 12
#: Time limit for one partition, whose rows are read unless an index or its bounds answer.
_TIME_LIMIT: Final = timedelta(seconds=1)
_TIMED_OUT: Final = ("57014", "55P03")


def hint_of(stage: Stage, now: datetime) -> str | None:
    """Return which whole partitions are stale and could be dropped instead of their rows; None if there are none.

    Only for a plain `Delete` on a table that is partitioned by ranges of time. Requires a transaction, and leaves it
    usable.
    """
    if not isinstance(stage, TableStage) or type(stage.action) is not Delete or stage.action.archive_to is not None:
        return None
    try:
        found = list(_stale_partitions(stage, now))
    except DeclarationError:  # not partitioned, or not by ranges of time
        return None
    if not found:
        return None
    first, *others = found
    size = f"{sum(each.bytes for each in found):,} bytes"
    if not others:
        return f"every row of the partition {first.name} is stale ({size}), so that DropPartitions could drop it"
    if len(found) < _EXAMINED:
        number = f"{len(found)} partitions"
    else:
        number = f"at least {len(found)} partitions"
    return (
        f"every row of {number} is stale ({first.name} to {found[-1].name}, {size}), so that DropPartitions could "
        "drop them"
    )


def _stale_partitions(stage: TableStage, now: datetime) -> Iterator[Partition]:
    """Yield the oldest partitions with rows, up to the first that is not stale as a whole."""
    table = read_partitions(stage.model)
    condition = fails(stage.stale(now), table.column)
    filled = [each for each in table.older_than(now) if each.rows != 0 and not (each.pending or each.is_foreign)]
    for partition in filled[:_EXAMINED]:
        try:
            with time_limit(_TIME_LIMIT):
                if reason_of_rows(stage.model, partition, [Keeping(condition, "not stale")]) is not None:
                    return
        except OperationalError as error:
            if sqlstate(error) not in _TIMED_OUT:
                raise
            return
        yield partition
