"""The library's own tables: runs, leases, overrides, outbox. Start with `models`, then `runs`."""
