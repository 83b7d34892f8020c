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
