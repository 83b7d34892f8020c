"""Fails CI builds that are stuck in a status: canceling, running, scheduled or pending.

============  =====================================================================
Source        Batch design document 6, ``Ci::StuckBuilds::DropCancelingWorker``
Runs          ``ci.stuck_jobs`` every hour; its children 15, 30 and 45 minutes later
Touches       ``ci_builds`` (update)
Limits        100 rows per statement, 25 min per run; stale after an hour, pending builds after a day
Concurrency   One run of each worker, by a lease of 30 minutes
On failure    Retried up to 25 times, and the next hour's run does the same work
============  =====================================================================
"""
