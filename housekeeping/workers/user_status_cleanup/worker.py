"""Declaration of the worker that deletes expired user statuses."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from housekeeping.core.events import user_status_cleared
from housekeeping.sweeps import AlertThresholds, Delete, Sweep
from housekeeping.workers.user_status_cleanup.models import UserStatus

#: Tables of this worker, by their name in the documents.
MODELS: Final = {"user_statuses": UserStatus}

#: Rights that it needs on them. To lock a row takes the right to update one of its columns.
RIGHTS: Final = {"user_statuses": ("SELECT", "DELETE", "UPDATE (clear_status_at)")}

sweep: Final = Sweep(
    name="user_status_cleanup.batch",
    stage_name="user_statuses",
    stale=UserStatus.scheduled_for_cleanup,
    order=(UserStatus.clear_status_at, UserStatus.user_id),
    action=Delete(),
    event=user_status_cleared,
    event_columns={"user_id": UserStatus.user_id, "clear_status_at": UserStatus.clear_status_at},
    schedule="* * * * *",  # document 48, 実行スケジュール
    batch_size=100,  # rows a statement; document 48, 備考
    max_runtime=timedelta(seconds=30),  # document 48, 備考
    # Rows that cannot be deleted must not use up every run's time.
    resume_after_limit=True,
    alerts=AlertThresholds(
        longest_run=timedelta(seconds=60),  # document 48, 監視・アラート
        backlog=10_000,  # rows; document 48, 監視・アラート
    ),
    feature_category="user_profile",
    data_consistency="sticky",
    confirm_first_run=False,
)

SWEEPS: Final = (sweep,)
