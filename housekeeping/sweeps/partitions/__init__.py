"""Partitions that are dropped as a whole: what is read of them, why one stays, and how one is detached and dropped.

Start with `action` (`DropPartitions`), then `stage` (one partition per batch).
"""
