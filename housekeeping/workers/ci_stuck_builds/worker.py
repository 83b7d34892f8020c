"""Declarations of the workers that fail stuck builds: the hourly parent and its three children."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from peewee import Expression

from housekeeping.sweeps import AlertThresholds, LeaseConfig, Sweep
from housekeeping.workers.ci_stuck_builds.builds_stage import stuck_builds
from housekeeping.workers.ci_stuck_builds.fan_out import EnqueueChildren
from housekeeping.workers.ci_stuck_builds.models import Build, BuildStatus, FailureReason

SCHEDULE: Final = "0 * * * *"  # document 6, 実行スケジュール
BATCH_SIZE: Final = 100  # rows a statement; document 6, テーブル別操作詳細
STALE_AFTER: Final = timedelta(hours=1)  # document 6, 備考
PENDING_FOR: Final = timedelta(days=1)  # docs/workers/ci_stuck_builds.md
LEASE_TTL: Final = timedelta(minutes=30)  # document 6, 排他制御
MAX_RUNTIME: Final = timedelta(minutes=25)  # well before the lease ends
LONGEST_RUN: Final = timedelta(minutes=30)  # document 6, 監視・アラート
MOST_DROPPED: Final = 1000  # builds per run, ten full batches; document 6, 監視・アラート gives no number
MOST_DOOMED: Final = 10  # builds per run; each is damaged data that a person has to look into

#: Child -> delay after the parent; document 6, 前後の処理との関連.
DELAYS: Final = {
    "ci.stuck_builds.drop_running": timedelta(minutes=15),
    "ci.stuck_builds.drop_scheduled": timedelta(minutes=30),
    "ci.stuck_builds.drop_canceling": timedelta(minutes=45),
}

#: Tables of these workers, by their names in the documents.
MODELS: Final = {"ci_builds": Build}

#: Rights that these workers need on their tables.
RIGHTS: Final = {
    "ci_builds": ("SELECT", "UPDATE (status, failure_reason, finished_at, updated_at, lock_version)"),
}


def drop_sweep(
    name: str,
    status: BuildStatus,
    outdated: Callable[[datetime], Expression],
    reason: FailureReason = FailureReason.STUCK_OR_TIMEOUT_FAILURE,
    stale_after: timedelta = STALE_AFTER,
) -> Sweep:
    """Return a sweep that drops the outdated builds of a status.

    Parameters:
      outdated: The predicate for such builds, given the time before which a build is outdated.
    """
    return Sweep(
        name=name,
        stages=lambda sweep: [stuck_builds(sweep, status, outdated, reason)],
        counts=("dropped", "doomed", "failed", "out_of_time"),
        progress_counts=("dropped", "doomed"),
        batch_size=BATCH_SIZE,
        max_runtime=MAX_RUNTIME,
        stale_after=stale_after,
        options={"log_records": True},
        lease=LeaseConfig(name.replace(".", "/"), LEASE_TTL),
        start_message=f"Cleaning {status.value}, timed-out builds",
        # Builds that can neither be dropped nor doomed must not use up the time of every run.
        resume_after_limit=True,
        alerts=AlertThresholds(longest_run=LONGEST_RUN, most={"dropped": MOST_DROPPED, "doomed": MOST_DOOMED}),
        feature_category="continuous_integration",
        data_consistency="always",
        partitioned=(Build,),
        confirm_first_run=False,
    )


def child_sweep(
    status: BuildStatus,
    outdated: Callable[[datetime], Expression],
    reason: FailureReason = FailureReason.STUCK_OR_TIMEOUT_FAILURE,
) -> Sweep:
    """Return a sweep that the parent enqueues every hour."""
    return replace(
        drop_sweep(f"ci.stuck_builds.drop_{status.value}", status, outdated, reason),
        # The parent sends each child again every hour, so a retry is delayed by minutes at most.
        rediscovered=True,
        # At most one message of a child is live: delayed, queued, running or waiting for a retry. A child that is
        # still running when its parent runs again is run once more right after, so that no hour is without its run.
        actor_options={
            "deduplicate": "until_executed",
            "deduplication": {"including_scheduled": True, "if_deduplicated": "reschedule_once"},
        },
    )


stuck_jobs: Final = replace(
    drop_sweep(
        "ci.stuck_jobs",
        BuildStatus.PENDING,
        lambda limit: (Build.created_at < limit) & (Build.updated_at < limit),
        stale_after=PENDING_FOR,
    ),
    counts=("enqueued", "dropped", "doomed", "failed"),
    schedule=SCHEDULE,
    # Before the lease, so that no failure of the parent's own work keeps the children from their hour.
    before_lease=EnqueueChildren(DELAYS),
)

drop_running: Final = child_sweep(BuildStatus.RUNNING, lambda limit: Build.updated_at < limit)

drop_scheduled: Final = child_sweep(
    BuildStatus.SCHEDULED, lambda limit: Build.scheduled_at < limit, FailureReason.STALE_SCHEDULE
)

drop_canceling: Final = child_sweep(
    BuildStatus.CANCELING,
    # Both times: a build that was canceled long after its creation is not stuck; document 6, 備考
    lambda limit: (Build.created_at < limit) & (Build.updated_at < limit),
)

# The parent last: sent in this order, no child is a duplicate of a message that the parent has enqueued.
SWEEPS: Final = (drop_running, drop_scheduled, drop_canceling, stuck_jobs)
