"""The workers that fail stuck builds, as declarations: the hourly parent and its three children."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from housekeeping.sweeps import Alarms, LeaseTerms, Sweep
from housekeeping.workers.ci_stuck_builds.builds_pass import stuck_builds
from housekeeping.workers.ci_stuck_builds.children import EnqueueChildren
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
    "settles": ("dropped", "doomed"),
    "alarms": Alarms(longest_run=LONGEST_RUN, most={"dropped": MOST_DROPPED, "doomed": MOST_DOOMED}),
    "feature_category": "continuous_integration",
    "data_consistency": "always",
    "partitioned": (Build,),
}
_CHILD: Final[dict[str, Any]] = {
    **_COMMON,
    "counts": ("dropped", "doomed", "failed", "out_of_time"),
    # Builds that can neither be dropped nor doomed must not use up every run's time before the others' turn.
    "goes_round": True,
    # One waits, from the moment the parent sends it. Only until it starts: a child still at work when its next
    # hour comes must not cost that hour its run. That two run at once is the lease's business.
    # The parent sends each again every hour.
    "rediscovered": True,
    "actor_options": {"deduplicate": "until_executing", "deduplication": {"including_scheduled": True}},
}

stuck_jobs: Final = Sweep(
    name="ci.stuck_jobs",
    passes=lambda sweep: [
        # First, so that nothing that happens to the pending builds keeps the children from their hour.
        EnqueueChildren(DELAYS),
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
    lease=LeaseTerms("ci/stuck_jobs", LEASE_TTL),
    starts_with="Cleaning pending, timed-out builds",
    # A run that broke off among the builds must not make the next one begin behind the children.
    starts_over=True,
)

drop_running: Final = Sweep(
    name="ci.stuck_builds.drop_running",
    passes=lambda sweep: [
        stuck_builds(
            sweep,
            BuildStatus.RUNNING,
            lambda limit: Build.updated_at < limit,
            FailureReason.STUCK_OR_TIMEOUT_FAILURE,
        )
    ],
    **_CHILD,
    lease=LeaseTerms("ci/stuck_builds/drop_running", LEASE_TTL),
    starts_with="Cleaning running, timed-out builds",
)

drop_scheduled: Final = Sweep(
    name="ci.stuck_builds.drop_scheduled",
    passes=lambda sweep: [
        stuck_builds(
            sweep, BuildStatus.SCHEDULED, lambda limit: Build.scheduled_at < limit, FailureReason.STALE_SCHEDULE
        )
    ],
    **_CHILD,
    lease=LeaseTerms("ci/stuck_builds/drop_scheduled", LEASE_TTL),
    starts_with="Cleaning scheduled, timed-out builds",
)

drop_canceling: Final = Sweep(
    name="ci.stuck_builds.drop_canceling",
    passes=lambda sweep: [
        stuck_builds(
            sweep,
            BuildStatus.CANCELING,
            # Both, so that a build canceled long after it was created is not taken for stuck; document 6, 備考
            lambda limit: (Build.created_at < limit) & (Build.updated_at < limit),
            FailureReason.STUCK_OR_TIMEOUT_FAILURE,
        )
    ],
    **_CHILD,
    lease=LeaseTerms("ci/stuck_builds/drop_canceling", LEASE_TTL),
    starts_with="Cleaning canceling, timed-out builds",
)

# The parent last: whoever sends each a message in this order finds no child waiting from the parent already.
SWEEPS: Final = (drop_running, drop_scheduled, drop_canceling, stuck_jobs)
