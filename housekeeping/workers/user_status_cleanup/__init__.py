"""Removes user statuses whose "clear after" time has passed.

============  =====================================================================
Source        Batch design document 48, ``UserStatusCleanup::BatchWorker``
Runs          Every minute; a status stays at most a minute too long
Touches       ``user_statuses`` (delete)
Limits        100 rows per statement, 30 s per run; the next run continues
Concurrency   Safe: rows locked by another run or session are skipped
On failure    Retried up to 25 times, and the next minute's run does the same work
============  =====================================================================
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from housekeeping import Alerts, Delete, Event, Guard, Limits, Rows, Sweep, events
from housekeeping.workers.user_status_cleanup.models import UserStatus

#: Tables of this worker, by their name in the documents.
MODELS: Final = {"user_statuses": UserStatus}

sweep: Final = Sweep(
    "user_status_cleanup.batch",
    Rows(
        UserStatus,
        stale=lambda row, now: row.clear_status_at <= now,
        order="clear_status_at",
        action=Delete(),
        event=Event(events.user_status_cleared, "user_id", "clear_status_at"),
        name="user_statuses",
    ),
    schedule="* * * * *",  # document 48, 実行スケジュール
    limits=Limits(
        batch=100,  # rows a statement; document 48, 備考
        runtime=timedelta(seconds=30),  # document 48, 備考
        # Rows that cannot be deleted must not use up every run's time.
        resume="after_limit",
        batch_takes=None,
    ),
    guard=Guard(first_run=False),
    alerts=Alerts(
        longest_run=timedelta(seconds=60),  # document 48, 監視・アラート
        backlog=10_000,  # rows; document 48, 監視・アラート
        late=timedelta(days=1),  # 1,440 runs; no document has a number
    ),
    actor={"feature_category": "user_profile", "data_consistency": "sticky"},
)

SWEEPS: Final = (sweep,)
