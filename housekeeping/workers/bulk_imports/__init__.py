"""Times out imports that have not moved for a day, and their entities with all that hangs on them.

============  =========================================================================================
Source        Batch design document 65, ``BulkImports::StaleImportWorker``
Runs          Every 4 hours; what has stood still for 24 hours is stale
Touches       ``bulk_imports``, ``bulk_import_entities``, ``bulk_import_trackers`` (status, updated_at)
Limits        1000 imports or 100 entities a transaction, 5 min a run; the next run goes on there
At once       Safe: rows locked by another run or session are left out, and entities with such a tracker
On failure    Retried up to 25 times; a row that cannot be changed is logged, reported and passed over
============  =========================================================================================
"""
