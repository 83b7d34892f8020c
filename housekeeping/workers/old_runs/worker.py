"""Declaration of the sweep that removes old rows from the library's own tables."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from peewee import fn

from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger.models import Action, Lease, ProcessRow, Rejection, RejectionReport, Run
from housekeeping.sweeps.processes.heartbeats import KEPT_FOR as PROCESSES_KEPT_FOR
from housekeeping.sweeps.stages.actions import Delete
from housekeeping.sweeps.stages.table_stage import TableStage

SCHEDULE: Final = "20 3 * * *"  # once a day, at a quiet hour and not on the hour
KEPT_FOR: Final = timedelta(days=30)  # docs/reference/ledger.md
#: Not configurable: deleting the row of a lease fences off its holder, so the lease must be out of use for certain.
LEASES_KEPT_FOR: Final = timedelta(days=30)
#: A rejection that no run has seen for this long belongs to records or arguments that no longer exist.
REJECTIONS_KEPT_FOR: Final = timedelta(days=30)
ACTIONS_KEPT_FOR: Final = timedelta(days=365)  # auditors ask for last year's; operators write few
REPORTS_KEPT_FOR: Final = timedelta(days=1)  # a report suppresses further ones for an hour only
BATCH_SIZE: Final = 1000  # rows per statement; they are small, and no other session locks them

#: No tables of the application: HOUSEKEEPING_SCHEMA says where the library's own are.
MODELS: Final[dict[str, Any]] = {}

RIGHTS: Final[dict[str, tuple[str, ...]]] = {}

_DELETED: Final = ("deleted_rows", "deleted_leases", "deleted_rejections", "deleted_processes", "deleted_actions")

#: The run that holds a lease, even if it has crashed and no other run has recorded that yet.
_OPEN: Final = Run.select(Run.id).where(Run.outcome.is_null() & (Run.epoch == Lease.epoch))

sweep: Final = Sweep(
    name="housekeeping.old_runs",
    stages=lambda sweep: [
        TableStage(
            name="runs",
            stale=lambda now: Run.finished_at < now - (sweep.stale_after or KEPT_FOR),
            order=(Run.finished_at, Run.id),
            action=Delete(rows_counted_as="deleted_rows"),
            batch_size=sweep.batch_size,
        ),
        TableStage(
            name="leases",
            stale=lambda now: (Lease.used_at < now - LEASES_KEPT_FOR) & ~fn.EXISTS(_OPEN),
            order=(Lease.used_at, Lease.key),
            action=Delete(rows_counted_as="deleted_leases"),
            batch_size=sweep.batch_size,
        ),
        TableStage(
            name="rejections",
            stale=lambda now: Rejection.last_at < now - REJECTIONS_KEPT_FOR,
            order=(Rejection.last_at, Rejection.worker, Rejection.subject, Rejection.cause),
            action=Delete(rows_counted_as="deleted_rejections"),
            batch_size=sweep.batch_size,
        ),
        TableStage(
            name="rejection_reports",
            stale=lambda now: RejectionReport.reported_at < now - REPORTS_KEPT_FOR,
            order=(RejectionReport.reported_at, RejectionReport.worker, RejectionReport.cause),
            action=Delete(rows_counted_as="deleted_rejections"),
            batch_size=sweep.batch_size,
        ),
        TableStage(
            name="processes",
            stale=lambda now: ProcessRow.heartbeat_at < now - PROCESSES_KEPT_FOR,
            order=(ProcessRow.heartbeat_at, ProcessRow.id),
            action=Delete(rows_counted_as="deleted_processes"),
            batch_size=sweep.batch_size,
        ),
        TableStage(
            name="actions",
            stale=lambda now: Action.at < now - ACTIONS_KEPT_FOR,
            order=(Action.at, Action.id),
            action=Delete(rows_counted_as="deleted_actions"),
            batch_size=sweep.batch_size,
        ),
    ],
    counts=(*_DELETED, "batches", "out_of_time"),
    progress_counts=_DELETED,
    schedule=SCHEDULE,
    batch_size=BATCH_SIZE,
    max_runtime=timedelta(seconds=60),
    stale_after=KEPT_FOR,
    confirm_first_run=False,
)

SWEEPS: Final = (sweep,)
