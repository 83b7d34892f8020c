"""Deletes git refs that an application has requested to delete, project by project.

============  ======================================================================================
Source        Batch design document 58, ``BatchedGitRefUpdates::CleanupSchedulerWorker`` and
              its follow-up ``ProjectCleanupWorker``
Runs          The scheduler every minute; one cleanup for each project with pending rows
Touches       ``batched_git_ref_updates_deletions`` (status), refs of bare repositories (delete)
Limits        10,000 projects per scheduler run; 10,000 rows per cleanup, in batches of 100 refs
Concurrency   One scheduler and one cleanup per project: leases of 10 minutes; if held, the run is skipped
On failure    Retried up to 25 times; pending rows are found again a minute later
============  ======================================================================================
"""
