"""Delivers events that wait in the outbox to their handlers.

============  =====================================================================
Source        docs/reference/events.md
Runs          Every minute
Touches       ``housekeeping.outbox`` (update, delete)
Limits        100 rows a claim, 30 s a run; what is left waits for the next run
At once       Safe: rows locked by another run are skipped
On failure    A row that could not be delivered waits, 1 min at first and 1 h at most
============  =====================================================================
"""
