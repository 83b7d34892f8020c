"""Deletes git refs that an application has requested to delete, project by project.

============  ======================================================================================
Source        Batch design document 58, ``BatchedGitRefUpdates::CleanupSchedulerWorker`` and
              its follow-up ``ProjectCleanupWorker``
Runs          The scheduler every minute; one cleanup for each project with pending rows
Touches       ``batched_git_ref_updates_deletions`` (status), refs of bare repositories (delete)
Limits        10,000 projects per scheduler run; 10,000 rows per cleanup, in batches of 100 refs
Concurrency   One scheduler and one cleanup per project: leases of 10 minutes; if held, the run is skipped
On failure    Retried up to 25 times; a project with a broken repository is deferred, up to an hour
============  ======================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from housekeeping import (
    Alerts,
    Argument,
    Delete,
    Finding,
    Guard,
    HousekeepingError,
    Lease,
    Limits,
    Rows,
    Settings,
    SettingsError,
    Sweep,
    actor_named,
)
from housekeeping.workers.batched_git_ref_updates.cleanup import PendingDeletions
from housekeeping.workers.batched_git_ref_updates.git import GitCli, backends
from housekeeping.workers.batched_git_ref_updates.models import Deletion, DeletionStatus
from housekeeping.workers.batched_git_ref_updates.scheduling import PendingProjects

SCHEDULE: Final = (
    "* * * * *"  # docs/workers/batched_git_ref_updates.md; the document leaves it to the settings (実行スケジュール)
)
BATCH_SIZE: Final = 100  # projects per batch; document 58, 備考
MAX_PROJECTS: Final = 10_000  # projects per run; document 58, 備考
LEASE_TTL: Final = timedelta(minutes=10)  # document 58, 排他制御
LONGEST_RUN: Final = timedelta(minutes=10)  # document 58, パフォーマンス要件: 目標処理時間
LATE: Final = timedelta(days=1)  # no document has a number
FAILED_RUNS: Final = 3  # in a row; document 58, 監視・アラート, without a number
MAX_RUNTIME: Final = timedelta(minutes=8)  # no document: below the lease's ttl, should its renewal fail
PAGE_SIZE: Final = 1000  # rows per page of a project; docs/workers/batched_git_ref_updates.md
GIT_BATCH_SIZE: Final = 100  # refs per git transaction; docs/workers/batched_git_ref_updates.md
PROCESSED_SCHEDULE: Final = "50 2 * * *"  # once a day, at a quiet hour and not on the hour
PROCESSED_KEPT_FOR: Final = timedelta(days=7)  # time to look into a deletion after a weekend
PROCESSED_BATCH_SIZE: Final = 1000  # rows per statement; no other session locks processed rows
MAX_DELETES: Final = 10_000  # rows per run of a project; docs/workers/batched_git_ref_updates.md

#: Tables of these workers, by their names in the documents.
MODELS: Final = {"batched_git_ref_updates_deletions": Deletion}

#: Rights that these workers need on their tables.
RIGHTS: Final = {"batched_git_ref_updates_deletions": ("SELECT", "UPDATE (status, updated_at)")}

project_cleanup: Final = Sweep(
    "batched_git_ref_updates.project_cleanup",
    lambda sweep: PendingDeletions(
        backends=backends,
        page_size=sweep.options["page_size"],
        git_batch_size=sweep.options["git_batch_size"],
        max_deletes=sweep.options["max_deletes"],
    ),
    lease=Lease(lambda project_id: f"batched_git_ref_updates/project_cleanup/{project_id}", LEASE_TTL),
    limits=Limits(PAGE_SIZE, MAX_RUNTIME, batch_takes=None),
    guard=Guard(first_run=False),
    alerts=Alerts(longest_run=LONGEST_RUN, failed_runs=FAILED_RUNS),
    argument=Argument("project id", int),
    options={"page_size": PAGE_SIZE, "git_batch_size": GIT_BATCH_SIZE, "max_deletes": MAX_DELETES},
    # The scheduler enqueues again every minute. A project whose cleanup fails has one live message instead of another
    # one each minute with 25 retries each.
    # A retry waits at most ten minutes.
    actor={
        "queue_name": "git_refs",
        "feature_category": "gitaly",
        "data_consistency": "delayed",
        "deduplicate": "until_executed",
        "rediscovered": True,
    },
)

cleanup_scheduler: Final = Sweep(
    "batched_git_ref_updates.cleanup_scheduler",
    lambda sweep: PendingProjects(
        children=lambda: actor_named(project_cleanup.name),
        batch_size=sweep.limits.batch,
        max_projects=sweep.options["max_projects"],
    ),
    schedule=SCHEDULE,
    lease=Lease("batched_git_ref_updates/cleanup_scheduler", LEASE_TTL),
    # Projects with high ids must not starve behind 10,000 busy ones.
    limits=Limits(BATCH_SIZE, MAX_RUNTIME, resume="after_limit", batch_takes=None),
    guard=Guard(first_run=False),
    alerts=Alerts(longest_run=LONGEST_RUN, failed_runs=FAILED_RUNS, late=LATE),
    options={"max_projects": MAX_PROJECTS},
    actor={"feature_category": "gitaly", "data_consistency": "sticky"},
)

processed_deletions: Final = Sweep(
    "batched_git_ref_updates.processed_deletions",
    Rows(
        Deletion,
        stale=lambda row, limit: (row.status == DeletionStatus.processed) & (row.updated_at < limit),
        order="id",  # the table has no index on updated_at
        age=PROCESSED_KEPT_FOR,
        action=Delete(),
    ),
    schedule=PROCESSED_SCHEDULE,
    # Ids grow, so old rows are at the front. A run that ended early has more of them behind it.
    limits=Limits(PROCESSED_BATCH_SIZE, MAX_RUNTIME, resume="after_limit", batch_takes=None),
    alerts=Alerts(late=LATE),
    actor={"feature_category": "gitaly"},
)

#: Workers that run only where the settings enable them.
DISABLED: Final = (processed_deletions.name,)

SWEEPS: Final = (cleanup_scheduler, project_cleanup, processed_deletions)


def configure(settings: Settings) -> None:
    """Apply the folder of the repositories.

    Raises:
      SettingsError: When `batch_size` is set, which this worker has under other names.
    """
    given = settings.workers.get(project_cleanup.name)
    if given is not None and given.batch_size is not None:
        raise SettingsError(
            f'HOUSEKEEPING_WORKERS["{project_cleanup.name}"]["batch_size"] is {given.batch_size}, '
            "but this worker has page_size (rows) and git_batch_size (refs)"
        )
    backends.use_root(settings.repositories_root)


def examine() -> Iterator[Finding]:
    """Check that the repositories and git are available, for `housekeeping doctor`."""
    area = project_cleanup.name
    try:
        backends.repositories.locate(1)
        yield Finding("fine", area, "repositories", "the folder exists")
    except HousekeepingError as error:
        yield Finding("error", area, "repositories", str(error), "set and mount it, or disable the worker")
    if not isinstance(backends.deletion, GitCli):
        return
    version = backends.deletion.version()
    if version is None:
        yield Finding("error", area, "git", "git was not found", "install git")
    else:
        yield Finding("fine", area, "git", version)
