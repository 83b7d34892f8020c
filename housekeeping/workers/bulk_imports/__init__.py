"""Times out imports without a change for a day, and stale entities with all their trackers.

============  =========================================================================================
Source        Batch design document 65, ``BulkImports::StaleImportWorker``
Runs          Every 4 hours; a row is stale 24 hours after its last change
Touches       ``bulk_imports``, ``bulk_import_entities``, ``bulk_import_trackers`` (status, updated_at)
Limits        1000 imports or 100 entities per transaction, 5 min per run; the next run resumes there
Concurrency   Safe: rows locked by another run or session are skipped, and entities with such a tracker
On failure    Retried up to 25 times; a row that cannot be changed is logged, reported and skipped
============  =========================================================================================
"""
