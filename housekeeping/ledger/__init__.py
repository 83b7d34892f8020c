"""The library's own tables: runs, ticks, leases, overrides, actions, outbox. Start with `schema`, then `runs`."""

from __future__ import annotations
