"""The workers that fail stuck builds, as declarations: the hourly parent and its three children."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from housekeeping.sweeps import AlertThresholds, LeaseConfig, Sweep
from housekeeping.workers.ci_stuck_builds.builds_stage import stuck_builds
from housekeeping.workers.ci_stuck_builds.fan_out import EnqueueChildren
from housekeeping.workers.ci_stuck_builds.models import Build, BuildStatus, FailureReason

SCHEDULE: Final = "0 * * * *"  # document 6, 実行スケジュール
BATCH_SIZE: Final = 100  # rows a statement; document 6, テーブル別操作詳細
STALE_AFTER: Final = timedelta(hours=1)  # document 6, 備考
PENDING_FOR: Final = timedelta(days=1)  # workers.md, 6
LEASE_TTL: Final = timedelta(minutes=30)  # document 6, 排他制御
MAX_RUNTIME: Final = timedelta(minutes=25)  # well before the lease ends; design.md, Settings
LONGEST_RUN: Final = timedelta(minutes=30)  # document 6, 監視・アラート
#: Builds of one run; document 6, 監視・アラート gives no number. Ten full batches are no longer a stray job or two.
MOST_DROPPED: Final = 1000
MOST_DOOMED: Final = 10  # builds of one run; likewise: each is damaged data that somebody has to look into

#: Child -> how long after the parent it runs; document 6, 前後の処理との関連.
DELAYS: Final = {
    "ci.stuck_builds.drop_running": timedelta(minutes=15),
    "ci.stuck_builds.drop_scheduled": timedelta(minutes=30),
    "ci.stuck_builds.drop_canceling": timedelta(minutes=45),
}

#: Tables of these workers, by their name in workers.md.
MODELS: Final = {"ci_builds": Build}

#: The rights they need on them.
RIGHTS: Final = {
    "ci_builds": ("SELECT", "UPDATE (status, failure_reason, finished_at, updated_at, lock_version)"),
}

_COMMON: Final[dict[str, Any]] = {
    "batch_size": BATCH_SIZE,
    "max_runtime": MAX_RUNTIME,
    "stale_after": STALE_AFTER,
    "options": {"log_records": True},
    "progress_counts": ("dropped", "doomed"),
    "alerts": AlertThresholds(longest_run=LONGEST_RUN, most={"dropped": MOST_DROPPED, "doomed": MOST_DOOMED}),
    "feature_category": "continuous_integration",
    "data_consistency": "always",
    "partitioned": (Build,),
    "confirm_first_run": False,
    # Builds that can neither be dropped nor doomed must not use up every run's time before the others' turn.
    "resume_after_limit": True,
}
_CHILD: Final[dict[str, Any]] = {
    **_COMMON,
    "counts": ("dropped", "doomed", "failed", "out_of_time"),
    # The parent sends each again every hour. A retry comes within minutes: it stands for the children of later hours.
    "rediscovered": True,
    # One message of a child is live at a time: delayed, queued, running, or waiting for a retry. A child that is still
    # running when its parent comes again runs once more right after, so that no hour is without its run.
    "actor_options": {
        "deduplicate": "until_executed",
        "deduplication": {"including_scheduled": True, "if_deduplicated": "reschedule_once"},
    },
}

stuck_jobs: Final = Sweep(
    name="ci.stuck_jobs",
    stages=lambda sweep: [
        stuck_builds(
            sweep,
            BuildStatus.PENDING,
            lambda limit: (Build.created_at < limit) & (Build.updated_at < limit),
            FailureReason.STUCK_OR_TIMEOUT_FAILURE,
        ),
    ],
    **{**_COMMON, "stale_after": PENDING_FOR},
    counts=("enqueued", "dropped", "doomed", "failed"),
    schedule=SCHEDULE,
    lease=LeaseConfig("ci/stuck_jobs", LEASE_TTL),
    # Nothing that happens to the parent's own work keeps the children from their hour.
    before_lease=EnqueueChildren(DELAYS),
    start_message="Cleaning pending, timed-out builds",
)

drop_running: Final = Sweep(
    name="ci.stuck_builds.drop_running",
    stages=lambda sweep: [
        stuck_builds(
            sweep,
            BuildStatus.RUNNING,
            lambda limit: Build.updated_at < limit,
            FailureReason.STUCK_OR_TIMEOUT_FAILURE,
        )
    ],
    **_CHILD,
    lease=LeaseConfig("ci/stuck_builds/drop_running", LEASE_TTL),
    start_message="Cleaning running, timed-out builds",
)

drop_scheduled: Final = Sweep(
    name="ci.stuck_builds.drop_scheduled",
    stages=lambda sweep: [
        stuck_builds(
            sweep, BuildStatus.SCHEDULED, lambda limit: Build.scheduled_at < limit, FailureReason.STALE_SCHEDULE
        )
    ],
    **_CHILD,
    lease=LeaseConfig("ci/stuck_builds/drop_scheduled", LEASE_TTL),
    start_message="Cleaning scheduled, timed-out builds",
)

drop_canceling: Final = Sweep(
    name="ci.stuck_builds.drop_canceling",
    stages=lambda sweep: [
        stuck_builds(
            sweep,
            BuildStatus.CANCELING,
            # Both, so that a build canceled long after it was created is not taken for stuck; document 6, 備考
            lambda limit: (Build.created_at < limit) & (Build.updated_at < limit),
            FailureReason.STUCK_OR_TIMEOUT_FAILURE,
        )
    ],
    **_CHILD,
    lease=LeaseConfig("ci/stuck_builds/drop_canceling", LEASE_TTL),
    start_message="Cleaning canceling, timed-out builds",
)

# The parent last: whoever sends each a message in this order finds no child waiting from the parent already.
SWEEPS: Final = (drop_running, drop_scheduled, drop_canceling, stuck_jobs)
