"""Deletes the objects and entries of direct uploads that were prepared and never completed.

============  =====================================================================
Source        Batch design document 100, ``ObjectStorage::DeleteStaleDirectUploadsWorker``
Runs          Every 6 minutes; an upload is stale after 3 h
Touches       Redis ``pending_direct_uploads`` and the objects its entries name (delete)
Limits        1000 entries per page, 250 s per run; the next run resumes there
Concurrency   Safe: each entry is claimed before its object is deleted
On failure    Retried up to 25 times; an unavailable store does not hold up the others
============  =====================================================================
"""
