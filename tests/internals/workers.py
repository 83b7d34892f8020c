"""Parts of `housekeeping.workers` that tests use."""

from __future__ import annotations

from housekeeping.workers import BUILT_IN, FAMILIES, configured_sweeps, families, kept_tables, only
from housekeeping.workers import batched_git_ref_updates as git_worker
from housekeeping.workers import bulk_imports as imports_worker
from housekeeping.workers import ci_stuck_builds as builds_worker
from housekeeping.workers import object_storage as upload_stage
from housekeeping.workers import user_status_cleanup as status_worker
from housekeeping.workers.batched_git_ref_updates import BATCH_SIZE as GIT_BATCH_SIZE
from housekeeping.workers.batched_git_ref_updates import (
    LEASE_TTL,
    cleanup,
    cleanup_scheduler,
    processed_deletions,
    project_cleanup,
)
from housekeeping.workers.batched_git_ref_updates import MAX_RUNTIME as GIT_MAX_RUNTIME
from housekeeping.workers.batched_git_ref_updates import MODELS as GIT_MODELS
from housekeeping.workers.batched_git_ref_updates import SWEEPS as GIT_SWEEPS
from housekeeping.workers.batched_git_ref_updates.cleanup import (
    PendingDeletions,
    _unchanged,
    mark_processed,
    pending_rows,
)
from housekeeping.workers.batched_git_ref_updates.git import (
    GitCli,
    RefDeletionFailed,
    RefsRefused,
    backends,
    delete_refs,
    hashed_path,
    is_ref_name,
)
from housekeeping.workers.batched_git_ref_updates.scheduling import (
    PendingProjects,
    count_pending_projects,
    deferred_among,
    pending_projects,
)
from housekeeping.workers.bulk_imports import MAX_RUNTIME as IMPORTS_MAX_RUNTIME
from housekeeping.workers.bulk_imports import MODELS as IMPORT_MODELS
from housekeeping.workers.bulk_imports import sweep as imports_sweep
from housekeeping.workers.bulk_imports.models import ImportStatus, SourceType, TrackerStatus
from housekeeping.workers.ci_stuck_builds import BATCH_SIZE as BUILDS_BATCH_SIZE
from housekeeping.workers.ci_stuck_builds import (
    DELAYS,
    LONGEST_RUN,
    drop_canceling,
    drop_pending,
    drop_running,
    drop_scheduled,
    stuck_jobs,
)
from housekeeping.workers.ci_stuck_builds import MAX_RUNTIME as BUILDS_MAX_RUNTIME
from housekeeping.workers.ci_stuck_builds import MODELS as BUILD_MODELS
from housekeeping.workers.ci_stuck_builds import SWEEPS as BUILD_SWEEPS
from housekeeping.workers.maintenance import old_runs as old_runs_sweep
from housekeeping.workers.maintenance import outbox as outbox_sweep
from housekeeping.workers.object_storage import LARGEST_BACKLOG, MAX_EXEC_DURATION, PendingUploadsStage, stores
from housekeeping.workers.object_storage import pending_uploads as pending_entry
from housekeeping.workers.object_storage import stores as deletion
from housekeeping.workers.object_storage import sweep as uploads_sweep
from housekeeping.workers.object_storage.pending_uploads import Claims, Entry, PendingUpload
from housekeeping.workers.object_storage.stores import ObjectStore, StoreDeletion, delete_file, parse_store_url
from housekeeping.workers.user_status_cleanup import MODELS as STATUS_MODELS
from housekeeping.workers.user_status_cleanup import SWEEPS as STATUS_SWEEPS
from housekeeping.workers.user_status_cleanup import sweep as status_sweep
