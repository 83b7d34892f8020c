"""Removes what is left of direct uploads that were prepared and never completed.

============  =====================================================================
Source        Batch design document 100, ``ObjectStorage::DeleteStaleDirectUploadsWorker``
Runs          Every 6 minutes; an upload that is not completed outlives 3 h by 6 min
Touches       Redis ``pending_direct_uploads`` and the objects its entries name (delete)
Limits        1000 entries a page, 250 s a run; the next run goes on where it stopped
At once       Safe: each entry is claimed before its object is deleted
On failure    Retried up to 25 times; a store that is away does not hold up the others
============  =====================================================================
"""
