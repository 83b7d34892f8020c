"""Fails CI builds that are stuck: canceling, running, scheduled or pending for longer than they can be.

============  =====================================================================
Source        Batch design document 6, ``Ci::StuckBuilds::DropCancelingWorker``
Runs          ``ci.stuck_jobs`` every hour; its children 15, 30 and 45 minutes later
Touches       ``ci_builds`` (update)
Limits        100 rows a statement, 25 min a run; stale for an hour, pending for a day
At once       One run of each worker, by its lease of 30 minutes
On failure    Retried up to 25 times, and the next hour's run does the same work
============  =====================================================================
"""
