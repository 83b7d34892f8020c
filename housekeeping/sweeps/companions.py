"""Sweeps that follow from another one: the retention of its archive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from peewee import Model

from housekeeping.database.catalog import quoted_name
from housekeeping.database.primary_key import key_of
from housekeeping.sweeps.checks.archives import archive_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.lease_config import LeaseConfig
from housekeeping.sweeps.stages.actions import Delete, archiving
from housekeeping.sweeps.stages.archive import ARCHIVED_AT, ARCHIVED_BY_RUN
from housekeeping.sweeps.stages.hold import hold_of_another_table
from housekeeping.sweeps.stages.table_stage import TableStage

#: What the name of an archive's sweep has after that of its sweep.
SUFFIX: Final = ".archive"
#: Attribute of a sweep that holds the sweep of its archive.
_COMPANION: Final = "_archive_sweep"


def with_companions(sweeps: Iterable[Sweep]) -> Iterator[Sweep]:
    """Yield the sweeps, each followed by the sweep of its archive if that keeps its rows for a time."""
    for sweep in sweeps:
        yield sweep
        companion = archive_sweep(sweep)
        if companion is not None:
            yield companion


def archive_sweep(sweep: Sweep) -> Sweep | None:
    """Return the sweep that deletes old rows from a sweep's archives; None if they stay for ever.

    It has the schedule and the limits of the sweep, and settings of its own. There is one object for each sweep.
    """
    known: Sweep | None = vars(sweep).get(_COMPANION)
    if known is None and (known := _made_for(sweep)) is not None:
        object.__setattr__(sweep, _COMPANION, known)
    return known


def following(companion: Sweep, sweep: Sweep) -> Sweep:
    """Return the sweep of an archive in the database of its sweep, which the settings may have changed."""
    return replace(companion, database=sweep.database)


def _made_for(sweep: Sweep) -> Sweep | None:
    """Return a sweep with a stage for each archive that keeps its rows for a time; None without one."""
    keeping: dict[type[Model] | None, tuple[TableStage, timedelta]] = {}
    for stage in sweep.declared_stages():
        if isinstance(stage, TableStage):
            action = archiving(stage.action)
            if action is not None and action.archive_keep is not None:
                keeping.setdefault(archive_of(stage), (stage, action.archive_keep))
    if not keeping:
        return None
    ages = {age for _, age in keeping.values()}
    lease = None if sweep.lease is None else LeaseConfig(f"{sweep.name}{SUFFIX}", sweep.lease.ttl)
    return Sweep(
        name=f"{sweep.name}{SUFFIX}",
        stages=lambda own: [_deleting(own, *each, alone=len(keeping) == 1) for each in keeping.values()],
        stale_after=ages.pop() if len(ages) == 1 else None,
        counts=("deleted_rows", "batches", "out_of_time"),
        progress_counts=("deleted_rows",),
        schedule=sweep.schedule,
        batch_size=sweep.batch_size,
        max_runtime=sweep.max_runtime,
        max_rows_per_s=sweep.max_rows_per_s,
        rest=sweep.rest,
        lease=lease,
        queue=sweep.queue,
        throttle=sweep.throttle,
        target_batch=sweep.target_batch,
        feature_category=sweep.feature_category,
        database=sweep.database,
    )


def _deleting(own: Sweep, stage: TableStage, age: timedelta, *, alone: bool) -> TableStage:
    """Return the stage of the companion that deletes the old rows of a stage's archive."""
    archive: Any = archive_of(stage)
    at, run = getattr(archive, ARCHIVED_AT), getattr(archive, ARCHIVED_BY_RUN)
    key = [getattr(archive, column.name) for column in key_of(stage.model)]
    return TableStage(
        name="rows" if alone else quoted_name(archive),
        stale=lambda now: at <= now - (own.stale_after or age),
        hold=None if stage.hold is None else hold_of_another_table(stage.hold, stage.model, archive),
        order=(at, *key, run),
        action=Delete(),
        batch_size=own.batch_size,
    )
