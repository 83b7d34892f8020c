"""The user status cleanup, as a declaration."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from housekeeping.core.events import user_status_cleared
from housekeeping.sweeps import AlertThresholds, Delete, Sweep, TableStage
from housekeeping.workers.user_status_cleanup.models import UserStatus

SCHEDULE: Final = "* * * * *"  # document 48, 実行スケジュール
BATCH_SIZE: Final = 100  # rows a statement; document 48, 備考
MAX_RUNTIME: Final = timedelta(seconds=30)  # document 48, 備考
LONGEST_RUN: Final = timedelta(seconds=60)  # document 48, 監視・アラート
LARGEST_BACKLOG: Final = 10_000  # rows due; document 48, 監視・アラート

#: Tables of this worker, by their name in the documents.
MODELS: Final = {"user_statuses": UserStatus}

#: The rights it needs on them: a row is locked by the right to update one column of it.
RIGHTS: Final = {"user_statuses": ("SELECT", "DELETE", "UPDATE (clear_status_at)")}

sweep: Final = Sweep(
    name="user_status_cleanup.batch",
    stages=lambda sweep: [
        TableStage(
            name="user_statuses",
            stale=UserStatus.scheduled_for_cleanup,
            # Oldest first; the key makes the order total, so that the walk can go on after any row.
            order=(UserStatus.clear_status_at, UserStatus.user_id),
            action=Delete(rows_counted_as="deleted_rows"),
            batch_size=sweep.batch_size,
            event=(user_status_cleared, ("user_id", "clear_status_at")),
        )
    ],
    counts=("deleted_rows", "batches", "out_of_time"),
    progress_counts=("deleted_rows",),
    schedule=SCHEDULE,
    batch_size=BATCH_SIZE,
    max_runtime=MAX_RUNTIME,
    # Rows that cannot be deleted must not use up every run's time before the others' turn.
    resume_after_limit=True,
    alerts=AlertThresholds(longest_run=LONGEST_RUN, backlog=LARGEST_BACKLOG),
    feature_category="user_profile",
    data_consistency="sticky",
    confirm_first_run=False,
)

SWEEPS: Final = (sweep,)
