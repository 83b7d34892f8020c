"""Removes user statuses whose "clear after" time has passed.

============  =====================================================================
Source        Batch design document 48, ``UserStatusCleanup::BatchWorker``
Runs          Every minute; a status outlives its time by a minute at most
Touches       ``user_statuses`` (delete)
Limits        100 rows a statement, 30 s a run; what is left waits for the next run
At once       Safe: rows locked by another run or session are skipped
On failure    Retried up to 25 times, and the next minute's run does the same work
============  =====================================================================
"""
