"""Deletes git refs that an application has asked to be deleted, project by project.

============  ======================================================================================
Source        Batch design document 58, ``BatchedGitRefUpdates::CleanupSchedulerWorker`` and
              its follow-up ``ProjectCleanupWorker``
Runs          The scheduler every minute; one cleanup for each project it finds work for
Touches       ``batched_git_ref_updates_deletions`` (status), refs of bare repositories (delete)
Limits        10,000 projects a scheduler's run; 10,000 rows a cleanup's, in batches of 100 refs
At once       One scheduler, one cleanup a project: leases of 10 minutes, held elsewhere = end quietly
On failure    Retried up to 25 times; what is still pending is found again a minute later
============  ======================================================================================
"""
