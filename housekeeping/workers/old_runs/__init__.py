"""Removes old rows of the library's own tables: runs, unused leases, and processes that are gone.

============  =====================================================================
Source        design.md, State in PostgreSQL: 30 days
Runs          Every day at 03:20
Touches       ``housekeeping.runs`` (delete), ``housekeeping.leases`` (delete; after 30 days unused),
              ``housekeeping.processes`` (delete; after a day without a heartbeat)
Limits        1000 rows a statement, 60 s a run; what is left waits for the next run
At once       Safe: rows locked by another run are skipped
On failure    Retried; the next day's run does the same work
============  =====================================================================
"""
