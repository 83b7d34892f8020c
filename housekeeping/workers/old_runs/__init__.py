"""Removes old rows from the library's own tables: runs, unused leases, rejections and stopped processes.

============  =====================================================================
Source        docs/reference/ledger.md: 30 days
Runs          Every day at 03:20
Touches       ``housekeeping.runs`` (delete), ``housekeeping.leases`` (delete; after 30 days unused),
              ``housekeeping.rejections`` and their reports (delete; after 30 days and a day),
              ``housekeeping.processes`` (delete; after a day without a heartbeat)
Limits        1000 rows per statement, 60 s per run; the next run continues
At once       Safe: rows locked by another run are skipped
On failure    Retried; the next day's run does the same work
============  =====================================================================
"""
