"""Delivers events from the outbox to their handlers.

============  =====================================================================
Source        docs/reference/events.md
Runs          Every minute
Touches       ``housekeeping.outbox`` (update, delete)
Limits        100 rows per claim, 30 s per run; the next run continues
At once       Safe: rows locked by another run are skipped
On failure    The row is retried, after 1 min at first and after 1 h at most
============  =====================================================================
"""
