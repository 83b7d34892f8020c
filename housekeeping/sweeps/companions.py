"""Sweeps that follow from another one: the retention of its archive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

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
    """Return the sweep that deletes old rows from a sweep's archive; None if they stay for ever.

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
    for stage in sweep.declared_stages():
        action = archiving(stage.action) if isinstance(stage, TableStage) else None
        if action is not None and action.archive_keep is not None:
            return _deleting(sweep, stage, action)
    return None


def _deleting(sweep: Sweep, stage: Any, action: Delete) -> Sweep:
    archive: Any = archive_of(stage)
    at, run = getattr(archive, ARCHIVED_AT), getattr(archive, ARCHIVED_BY_RUN)
    key = [getattr(archive, column.name) for column in key_of(stage.model)]
    lease = None if sweep.lease is None else LeaseConfig(f"{sweep.name}{SUFFIX}", sweep.lease.ttl)
    return Sweep(
        name=f"{sweep.name}{SUFFIX}",
        stale=lambda now: at <= now,
        stale_after=action.archive_keep,
        hold=None if stage.hold is None else hold_of_another_table(stage.hold, stage.model, archive),
        order=(at, *key, run),
        action=Delete(),
        schedule=sweep.schedule,
        batch_size=sweep.batch_size,
        max_runtime=sweep.max_runtime,
        lease=lease,
        queue=sweep.queue,
        throttle=sweep.throttle,
        target_batch=sweep.target_batch,
        feature_category=sweep.feature_category,
        database=sweep.database,
    )
