"""Recipes for job queues and schedulers that keep their jobs in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Unpack

from peewee import SQL, fn

from housekeeping.core.errors import DeclarationError
from housekeeping.recipes.tables import BATCH_SIZE, table
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.options import SweepOptions
from housekeeping.sweeps.stages.actions import Delete

#: States of a job of procrastinate that no worker changes.
FINISHED: Final = ("succeeded", "failed", "cancelled", "aborted")


def procrastinate_jobs(
    *,
    older_than: timedelta,
    statuses: Sequence[str] = ("succeeded",),
    name: str = "recipes.procrastinate_jobs",
    schema: str | None = None,
    **options: Unpack[SweepOptions],
) -> Sweep:
    """Return a sweep that deletes finished jobs of procrastinate, like its task ``remove_old_jobs``.

    Their events go with them by the foreign key. A trigger of procrastinate unlinks periodic defers.

    Parameters:
      older_than: Time since the job's last event.
      statuses: States of the deleted jobs: ``succeeded``, ``failed``, ``cancelled``, ``aborted``.
      schema: Schema of procrastinate's tables, if it is not in the connection's search path.

    Raises:
      DeclarationError: A status is that of an unfinished job, or unknown.
    """
    if isinstance(statuses, str) or not statuses or (wrong := [each for each in statuses if each not in FINISHED]):
        found = repr(statuses) if isinstance(statuses, str) or not statuses else repr(wrong[0])
        raise DeclarationError(f"{name}: statuses has {found}; it should be a tuple of {', '.join(FINISHED)}")
    prefix = f"{schema}." if schema else ""
    job = table(f"{prefix}procrastinate_jobs", "id", id="bigint", status="procrastinate_job_status")
    event = table(f"{prefix}procrastinate_events", "id", id="bigint", job_id="bigint", at="timestamptz")

    def stale(limit: datetime) -> Any:
        events = event.select(SQL("1")).where(event.job_id == job.id)
        is_old = fn.EXISTS(events) & ~fn.EXISTS(events.where(event.at >= limit))
        return job.status.in_(tuple(statuses)) & is_old

    given: Any = {"batch_size": BATCH_SIZE, "schedule": "12 * * * *", "stale_after": older_than, **options}
    return Sweep(name=name, stale=stale, order=(job.id,), action=Delete(), **given)


def apscheduler_jobs(
    *,
    older_than: timedelta,
    name: str = "recipes.apscheduler_jobs",
    table_name: str = "apscheduler_jobs",
    **options: Unpack[SweepOptions],
) -> Sweep:
    """Return a sweep that deletes jobs of APScheduler 3 that no scheduler has run since they were due.

    APScheduler removes a finished job by itself. Jobs stay if their scheduler is gone. Paused jobs are kept.

    Parameters:
      older_than: Time since the job was due. It should be longer than any outage of a scheduler.
      table_name: As in ``SQLAlchemyJobStore(tablename=...)``.
    """
    job = table(table_name, "id", id="varchar(191)", next_run_time="double precision")
    given: Any = {"batch_size": BATCH_SIZE, "schedule": "42 3 * * *", "stale_after": older_than, **options}
    return Sweep(
        name=name,
        stale=lambda limit: job.next_run_time < limit.timestamp(),
        order=(job.next_run_time, job.id),
        action=Delete(),
        **given,
    )
