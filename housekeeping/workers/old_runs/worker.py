"""Declaration of the sweep that removes old rows from the library's own tables."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from peewee import fn

from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger.models import Action, Lease, ProcessRow, Rejection, RejectionReport, Run
from housekeeping.sweeps.ledger.runs import PREDICATE
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


_later: Any = Run.alias("later")


def _has_fingerprint(run: Any) -> Any:
    return fn.JSONB_EXTRACT_PATH_TEXT(run.counts, PREDICATE).is_null(False)


#: Whether a run has its worker's last fingerprint. Without it, a worker that runs once a month would be new each time,
#: and wait for a confirmation.
_LAST_FINGERPRINT: Final = _has_fingerprint(Run) & ~fn.EXISTS(
    _later.select(_later.id).where((_later.worker == Run.worker) & (_later.id > Run.id) & _has_fingerprint(_later))
)


def _stages(sweep: Sweep) -> list[TableStage]:
    """Return a stage for each table, whose rows are deleted some time after the first column of their order."""

    def aged(name: str, order: tuple[Any, ...], kept_for: timedelta, count: str, *, unless: Any = None) -> TableStage:
        def stale(now: datetime) -> Any:
            old = order[0] < now - kept_for
            return old if unless is None else old & ~unless

        action = Delete(rows_counted_as=count)
        return TableStage(name=name, stale=stale, order=order, action=action, batch_size=sweep.batch_size)

    seen = (Rejection.last_at, Rejection.worker, Rejection.subject, Rejection.cause)
    reported = (RejectionReport.reported_at, RejectionReport.worker, RejectionReport.cause)
    used = (Lease.used_at, Lease.key)
    kept_for = sweep.stale_after or KEPT_FOR
    return [
        aged("runs", (Run.finished_at, Run.id), kept_for, "deleted_rows", unless=_LAST_FINGERPRINT),
        aged("leases", used, LEASES_KEPT_FOR, "deleted_leases", unless=fn.EXISTS(_OPEN)),
        aged("rejections", seen, REJECTIONS_KEPT_FOR, "deleted_rejections"),
        aged("rejection_reports", reported, REPORTS_KEPT_FOR, "deleted_rejections"),
        aged("processes", (ProcessRow.heartbeat_at, ProcessRow.id), PROCESSES_KEPT_FOR, "deleted_processes"),
        aged("actions", (Action.at, Action.id), ACTIONS_KEPT_FOR, "deleted_actions"),
    ]


sweep: Final = Sweep(
    name="housekeeping.old_runs",
    stages=_stages,
    counts=(*_DELETED, "batches", "out_of_time"),
    progress_counts=_DELETED,
    schedule=SCHEDULE,
    batch_size=BATCH_SIZE,
    max_runtime=timedelta(seconds=60),
    stale_after=KEPT_FOR,
    confirm_first_run=False,
)

SWEEPS: Final = (sweep,)
